"""Every Python and shell block of README and docs runs by itself, as it is printed.

See `tests/support/snippets.py` for the stand-ins and for what is parsed, not run.
"""

import re

import pytest

from stree_jax.cli import main as cli
from tests.support import snippets
from tests.support.snippets import ROOT, Snippet


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory):
    return tmp_path_factory.mktemp("stand-ins")


@pytest.fixture
def folder(stand_ins, tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    snippets.stand_ins(stand_ins, path)
    before = snippets.state(stand_ins)
    yield path
    assert snippets.state(stand_ins) == before, "the block writes in a file of others"


@pytest.fixture(scope="module")
def server():
    """The port of a server of the bundled pair, for blocks that ask one."""
    port = snippets.free_port()
    with snippets.served(port, "--drafter", "none") as process:
        snippets.wait_until_ready(port, process)
        yield port


@pytest.mark.parametrize("snippet", snippets.snippets("python"), ids=lambda s: s.id)
def test_python_runs_alone(snippet, folder, request):
    if "OpenAI(" in snippet.code:
        snippet = snippets.at_port(snippet, request.getfixturevalue("server"))
    snippets.run_python(snippet, folder)


@pytest.mark.parametrize("snippet", snippets.snippets("sh"), ids=lambda s: s.id)
def test_shell_runs_alone(snippet, folder, request):
    if "curl " in snippet.code and "stree-jax serve" not in snippet.code:
        snippet = snippets.at_port(snippet, request.getfixturevalue("server"))
    snippets.run_shell(snippet, folder)


RESULTS = sorted((ROOT / "bench").glob("*.md"))


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.name)
def test_commands_above_tables_are_commands(page):
    """They take hours; here, their options are known to the command."""
    parser = cli.build_parser()
    for snippet in snippets.snippets("sh", [page]):
        for words in snippets.commands(snippet):
            fixed = [re.sub(r"^DTYPE$", "float32", word) for word in words]
            try:
                parser.parse_args(fixed)
            except SystemExit as end:  # --help
                assert end.code == 0, words


def test_a_broken_snippet_is_found(folder):
    """The harness itself fails on the mistakes that it is there for."""
    page = ROOT / "README.md"
    wrong = {
        "stree-jax generate hi --no-such-option": "--no-such-option",
        "pip install 'stree-jax[gguf]'": "not on PyPI",
        "pip install '.[no_such_extra]'": "no_such_extra",
        "stree-jax info NOWHERE/": "NOWHERE",
    }
    for i, (line, said) in enumerate(wrong.items()):
        place = folder / str(i)
        place.mkdir()
        with pytest.raises(AssertionError, match=re.escape(said)):
            snippets.run_shell(Snippet(page, 1, "sh", line + "\n"), place)
    with pytest.raises(NameError):
        snippets.run_python(Snippet(page, 1, "python", "print(result)\n"), folder)
