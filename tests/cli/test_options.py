"""Options: help, suggestions for misspelt words, and one meaning for each name."""

import argparse
import subprocess
import sys

import pytest

from bench.registry import BENCHMARKS
from stree_jax.cli import main as cli
from stree_jax.cli.options import HelpFormatter, Parser, add

COMMANDS = (
    *("generate", "demo", "chat", "serve", "info", "convert", "export", "plan", "tune"),
    *("train", "distill", "heads", "ngrams", "bench", "completion"),
)


def parsers(parser=None, name=""):
    """Yields (name, parser) of every command and benchmark."""
    parser = parser or cli.build_parser()
    parser.complete_options()
    below = False
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = True
            for word, inner in action.choices.items():
                yield from parsers(inner, f"{name} {word}".strip())
    if not below:
        yield name, parser


def options(parser):
    return [a for a in parser._actions if a.option_strings and a.dest != "help"]


def refused(capsys, *words):
    """The line with which the parser refuses words."""
    with pytest.raises(SystemExit) as end:
        cli.main([*words])
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1), err
    return err


def test_commands_are_listed_in_order():
    (commands,) = commands_of_root()
    assert set(COMMANDS) <= set(commands.choices)
    order = [name for name in commands.choices if name in COMMANDS]
    assert order == list(COMMANDS)
    text = cli.build_parser().format_help()
    assert text.index("stree-jax generate") < text.index("commands:")


def commands_of_root():
    return [
        action
        for action in cli.build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]


def test_every_option_says_what_it_does_and_its_default():
    for name, parser in parsers():
        for action in parser._actions:
            assert action.help, (name, action.option_strings)
            if action.default in (None, False, [], argparse.SUPPRESS):
                continue
            shown = action.default
            if isinstance(shown, list | tuple):
                shown = " ".join(map(str, shown))
            assert f"(default: {shown})" in action.help, (name, action.option_strings)
        assert parser.format_help()


def test_help_has_groups_and_examples():
    groups = {
        "generate": "Model Drafting Sampling Stopping Output",
        "chat": "Model Drafting Sampling Stopping Conversation",
        "serve": "Model Drafting Network Limits",
        "plan": "Model Drafting Workload Output",
        "distill": "Target Training Output",
    }
    for name, parser in parsers():
        if name.startswith("bench"):
            continue
        text = parser.format_help()
        assert "example" in text and f"\n  stree-jax {name}" in text, name
        for title in groups.get(name, "").split():
            assert f"\n{title}:\n" in text, (name, title)
    text = dict(parsers())["generate"].format_help()
    assert "\nMemory and devices:\n" in text
    assert text.startswith("usage: stree-jax generate [PROMPT] [options]\n")


def test_help_keeps_examples_and_fills_paragraphs():
    parser = argparse.ArgumentParser(
        prog="p", formatter_class=HelpFormatter, epilog="a\nb\n\nc:\n  d   e\n  f"
    )
    assert parser.format_help().endswith("\na b\n\nc:\n  d   e\n  f\n")


# Options with more than one help text, and the meaning that all of them share.
ONE_MEANING = {
    "--arms": "setups that a benchmark measures",
    "--attention": "attention layers",
    "--batch": "sequences that are processed together",
    "--chat-template": "a Jinja file in place of the model's template",
    "--context": "tokens of a prompt and its answer together",
    "--count": "prompts of each file",
    "--draft-vocab": "number of tokens that can be drafted",
    "--drafter": "what proposes draft tokens; for ngrams, whose text is counted",
    "--dtype": "dtype of weights",
    "--dtypes": "dtypes of weights",
    "--file": "a file of the prompt or of the message",
    "--earlier": "earlier answers to draft from: a file, or how many tokens to keep",
    "--figure": "the path of figures to write",
    "--json": "figures as JSON: printed; of a benchmark, which prints a table, a file",
    "--lengths": "tokens of a text",
    "--levels": "levels of a tree",
    "--logprobs": "most likely tokens with log-probabilities",
    "--max-new-tokens": "most new tokens of an answer",
    "--memory": "a memory limit",
    "--minutes": "when to stop",
    "--model": "the model: of a directory, GGUF file or the hub",
    "--models": "models to measure",
    "--llama-python": "a Python that has llama-cpp-python",
    "--ngram-levels": "levels that n-grams propose at a time",
    "--ngram-width": "tokens that n-grams propose for a node",
    "--ngrams": "a file of n-grams",
    "--out": "what to create",
    "--own-tokens": "tokens of text that a model writes itself to learn from",
    "--pairs": "pairs of target and drafter",
    "--prompts": "files of prompts",
    "--queries": "successive prompts and answers of --context tokens",
    "--rule": "the acceptance rule",
    "--seed": "seed of the random numbers",
    "--shape": "the published shape of a model",
    "--shapes": "the published shapes of models",
    "--sizes": "nodes of trees",
    "--steps": "steps of the command's loop: of the optimizer, or of decoding",
    "--temperature": "sampling temperature",
    "--text": "texts: to train on, or of a benchmark",
    "--tokens": "tokens of text to learn from",
    "--top-k": "sampling among the K most likely tokens",
    "--tree": "the shape of the draft tree",
    "--trees": "shapes of draft trees",
    "--warmup": "steps of warm-up",
    "--widen": "padding of a model with zeros",
    "--width": "width of a model (d_model)",
}


def test_every_name_has_one_meaning():
    """Two commands that describe an option in other words are listed above."""
    texts = {}
    for name, parser in parsers():
        for action in options(parser):
            text = action.help.partition(" (default")[0]
            key = text, str(action.type), action.nargs == 0
            for option in action.option_strings:
                texts.setdefault(option, {}).setdefault(key, []).append(name)
    several = {option: found for option, found in texts.items() if len(found) > 1}
    new = {k: v for k, v in several.items() if k not in ONE_MEANING}
    assert not new, f"another meaning, or the same in other words: {new}"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("generate x --temprature 1", "unknown option --temprature; did you mean "),
        ("generate x --max-tokens 1", "did you mean --max-new-tokens?"),
        ("generate x --draft-model=y", "did you mean --drafter?"),
        ("plan --memroy 8GB", "unknown option --memroy; did you mean --memory?"),
        ("bench decode --promts x", "did you mean --prompts?"),
        ("generate x --xyzzy", "unknown option --xyzzy (see stree-jax generate"),
        ("generate x -q", "unexpected argument '-q'"),
        ("generate x y", "unexpected argument 'y'"),
        ("--versoin", "unknown option --versoin; did you mean --version?"),
        ("genrate x", "unknown command 'genrate'; did you mean 'generate'?"),
        ("xyzzy", "unknown command 'xyzzy'; known: generate, "),
        ("bench decod", "unknown benchmark 'decod'; did you mean 'decode'?"),
        ("generate x --dtype flaot32", "'flaot32'; did you mean 'float32'?"),
        ("generate x --dtype Float32", "'Float32'; did you mean 'float32'?"),
        ("generate x --dtype q", "'q'; known: float32, bfloat16, int8"),
        ("bench kernels --dtype int", "unknown value 'int'"),
        ("completion bsh", "did you mean 'bash'?"),
        ("generate x --n", "--n: expected one argument"),
        ("", "the following arguments are required: COMMAND (see stree-jax --help)"),
    ],
)
def test_a_wrong_word_names_the_closest_one(words, problem, capsys):
    err = refused(capsys, *words.split())
    assert problem in err
    command = " ".join(word for word in words.split() if word in COMMANDS)
    assert err.startswith(f"stree-jax {command}".strip())


def test_unknown_values_that_the_library_checks_name_the_closest_one(capsys):
    for words, close in (
        ("--tree atuo", "auto"),
        ("--tree chian:4", "chain:N"),
        ("--drafter lokup", "'lookup'"),
        ("--drafter demo-haeds", "'demo-heads'"),
        ("--temperature 1 --rule recursiv", "'recursive'"),
    ):
        code = cli.main(["generate", "x", "--max-new-tokens", "2", *words.split()])
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert close in err, err


@pytest.mark.parametrize(
    ("words", "renamed"),
    [
        ("generate x --ahead 2", "--ahead is now --ngram-levels"),
        ("chat --width=2", "--width is now --ngram-width"),
        ("serve --ahead 2", "--ahead is now --ngram-levels"),
        ("tune --width 2", "--width is now --ngram-width"),
        ("bench staged --ahead 1 2", "--ahead is now --ngram-levels"),
        ("bench unrolled --widths 2", "--widths is now --beam-widths"),
    ],
)
def test_an_old_name_names_the_new_one(words, renamed, capsys):
    assert renamed in refused(capsys, *words.split())


def test_words_that_look_like_options_but_are_values():
    parse = cli.build_parser().parse_args
    assert parse(["generate", "--", "--x"]).prompt == "--x"
    assert parse(["generate", "--stop", "-- x"]).stop == ["-- x"]
    assert parse(["generate", "--stop=--x"]).stop == ["--x"]
    assert parse(["generate", "--max-new", "3", "x"]).max_new_tokens == 3


def test_options_may_be_added_when_a_parser_is_used():
    parser, asked = Parser(prog="p"), []

    def add_options(p):
        asked.append(p)
        add(p, "--n", int, 1, "number")

    parser.add_options = add_options
    assert not asked and parser.parse_args(["--n", "2"]).n == 2
    assert parser.parse_args([]).n == 1 and asked == [parser]


def test_help_is_quick():
    """Imports of jax or numpy take a second."""
    code = """
import sys
from stree_jax.cli.main import main
for words in [], ["generate"], ["serve"], ["plan"], ["heads"], ["completion"]:
    try:
        main([*words, "--help"])
    except SystemExit as end:
        assert end.code == 0
heavy = {"jax", "numpy", "matplotlib", "tokenizers"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_all_benchmarks_are_commands():
    names = [name.split() for name, _ in parsers()]
    assert {words[1] for words in names if len(words) == 2} == set(BENCHMARKS)
