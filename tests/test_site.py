"""The documentation site: its pages, and those that are made from the code.

`make docs` builds it with `--strict`, which finds broken links and anchors; these tests
need nothing but the test extra.
"""

import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

import stree_jax
from bench.registry import BENCHMARKS
from stree_jax.cli.commands import COMMANDS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
TOOLS = DOCS / "tools"
NAMES = re.compile(r"^::: (\S+)$", re.M)


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without the objects that its Python tags stand for."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


@pytest.fixture
def tools(monkeypatch):
    """Imports a module of the site's tools by name."""
    monkeypatch.syspath_prepend(str(TOOLS))
    yield importlib.import_module
    for name in ("cli_page", "links"):
        sys.modules.pop(name, None)


def pages_of(entry):
    """Yields the pages of an entry of the navigation."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for below in entry.values():
            yield from pages_of(below)
    else:
        for below in entry:
            yield from pages_of(below)


def test_the_navigation_has_every_page_once():
    settings = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)
    listed = Counter(pages_of(settings["nav"]))
    files = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert set(listed) == files | {"reference/cli.md"}  # made by docs/tools/hooks.py
    assert set(listed.values()) == {1}


def described():
    """Names that the API pages describe."""
    pages = sorted((DOCS / "reference" / "api").glob("*.md"))
    return [name for page in pages for name in NAMES.findall(page.read_text("utf-8"))]


def test_the_api_pages_have_every_public_name_once():
    names = Counter(described())
    public = {
        f"stree_jax.{name}"
        for name in stree_jax.__all__
        if callable(getattr(stree_jax, name))
    }
    missing = public - set(names)
    assert not missing
    assert max(names.values()) == 1


def find(name):
    """Imports an attribute of a module, or a module; raises ImportError for others."""
    module, _, last = name.rpartition(".")
    if not hasattr(importlib.import_module(module), last):
        importlib.import_module(name)


@pytest.mark.parametrize("name", described())
def test_what_the_api_pages_describe_exists(name):
    find(name)


def test_a_name_that_does_not_exist_is_found():
    with pytest.raises(ImportError):
        find("stree_jax.sampling.settings.NoSuchName")


def test_members_that_the_api_pages_choose_exist():
    """A module is described by some of its members; a misspelt one would be missing."""
    block = re.compile(r"^::: (\S+)\n((?: {4}.*\n)+)", re.M)
    found = 0
    for page in (DOCS / "reference" / "api").glob("*.md"):
        for name, text in block.findall(page.read_text("utf-8")):
            members = yaml.safe_load(text)["options"].get("members")
            if not members:
                continue
            module = importlib.import_module(name)
            for member in members:
                assert hasattr(module, member), f"{page.name}: {name}.{member}"
                found += 1
    assert found


def test_the_page_of_the_command_line_has_every_command(tools):
    page = tools("cli_page").page()
    for command in COMMANDS:
        assert f"\n## stree-jax {command.name}\n" in page
    for name in BENCHMARKS:
        assert f"\n| `{name}` | " in page
    assert "| `--max-new-tokens N` | " in page


def test_the_page_of_the_command_line_needs_no_package():
    """`make docs` has an environment without jax."""
    code = (
        "import sys\n"
        f"sys.path[:0] = [{str(TOOLS)!r}, {str(ROOT)!r}]\n"
        "import cli_page\n"
        "cli_page.page()\n"
        "assert not {'jax', 'numpy', 'tokenizers', 'shtab'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_links_that_leave_docs_are_found(tools):
    links = tools("links")
    text = (
        "[in](other.md#a) ![figure](../../bench/figures/a.png) [web](https://x.y/z)\n"
        "[table](../../bench/RESULTS.md#speed) [up](../index.md) [here](#anchor)\n"
        "```sh\n[code](../../Makefile)\n```\n[after](../../models)\n"
    )
    found = list(links.outside_links(text, "how-to/page.md"))
    assert [(path, anchor) for _, path, anchor in found] == [
        ("bench/figures/a.png", ""),
        ("bench/RESULTS.md", "#speed"),
        ("models", ""),
    ]
    begin, end = found[1][0]
    assert text[begin:end] == "../../bench/RESULTS.md#speed"
    assert links.image_uri("bench/figures/a.png") == "figures/a.png"
    assert not links.image_uri("bench/RESULTS.md")


def test_pages_have_edit_links():
    """MkDocs knows the address of each page; the theme shows it with this feature."""
    settings = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)
    assert "content.action.edit" in settings["theme"]["features"]
    assert "config.edit_uri" in (TOOLS / "hooks.py").read_text("utf-8")


@pytest.mark.parametrize("word", ["Ollama", "llama.cpp", "Docker", "Streaming"])
def test_the_search_finds_what_newcomers_look_for(word):
    """The site's search puts headings first."""
    pages = "\n".join(page.read_text("utf-8") for page in DOCS.rglob("*.md"))
    assert re.search(rf"^#+ .*\b{re.escape(word)}", pages, re.M)


def test_each_docker_file_is_on_a_page():
    pages = "\n".join(page.read_text("utf-8") for page in DOCS.rglob("*.md"))
    for file in ROOT.glob("Dockerfile*"):
        assert f"`{file.name}`" in pages
