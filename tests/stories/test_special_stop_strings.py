"""Stop strings with special tokens, and log-probabilities token by token.

Front ends send `stop: ["<|im_end|>"]`, the text of a special token that answers leave
out. The models follow a table, so each text is known by hand. vLLM with
`skip_special_tokens=False` shows and searches the same text.
"""

import json

import gguf
import pytest

import stree_jax
from stree_jax.cli.main import main
from tests.support import table_models, table_server

STOPS = [
    (["<|im_end|>"], "xyk"),
    (["k<|im_end|>"], "xy"),
    (["never", "<|im_end|>"], "xyk"),
    (["<|im_end|><|im_start|>"], "xyk"),
    (["k<|im_end|><|im_start|>q"], "xy"),
    (["<|im_start|>q"], "xyk"),
    (["im_end"], "xyk"),
    (["<|im_start|>qp", "yk<|im"], "x"),
    (["pqp", "qp<|im_end|>"], "xykq"),
]
SPECIAL = ("<|im_end|>", "<|im_start|>")
NAMES = [*"xyk", *SPECIAL, "q", "p", "q"]  # then p and q in turn


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    tokenizer = table_models.byte_level()
    chain = table_models.follow(tokenizer, NAMES)
    folder = tmp_path_factory.mktemp("stops") / "model"
    return table_models.write_llama(
        folder, len(chain), tokenizer=tokenizer, chain=chain
    )


@pytest.fixture(scope="module")
def model(directory):
    return stree_jax.load(directory)


def generated(model, prompt="x", **options):
    options = dict(max_new_tokens=15, drafter=None) | options
    return stree_jax.generate(model, [prompt], **options)


def test_special_stop_strings_end_a_text(model):
    lists = [stops for stops, _ in STOPS]
    options = dict(max_new_tokens=15, drafter=None, n=2)
    result = stree_jax.generate(
        model, ["\n x"] * len(lists), stop_strings=lists, **options
    )
    for row, text in enumerate(result.texts):
        stops, expected = STOPS[row // 2]
        assert "x" + text == expected or (text, expected) == ("", "x")
        assert result.finish_reasons[row] == "stop"
        assert result.stop_reasons[row] in stops
    assert result.lengths[:2].tolist() == [3, 3]


def test_streams_do_not_show_a_special_stop_string(model):
    for stops, expected in STOPS:
        shown = ""
        options = dict(stop_strings=stops, max_new_tokens=15, drafter=None)
        for result in stree_jax.stream(model, ["x"], steps=1, **options):
            shown += result.new_texts[0]
            assert ("x" + shown) == expected[: len(shown) + 1]
        assert "x" + shown == expected


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_special_stop_strings_in_gguf_files(tmp_path, kind):
    control = gguf.TokenType.CONTROL
    if kind == "gpt2":
        tokenizer, scores = table_models.byte_level(), None
        kinds = dict.fromkeys(table_models.SPECIAL, control)
        chain = table_models.follow(tokenizer, [*"xyk", "<|im_start|>", "q", "p", "q"])
        special, text, prompt = "<|im_start|>", "yk", "x"
    else:
        tokenizer = table_models.spm()
        size = len(tokenizer.get_vocab())
        scores, kinds = [-float(i) for i in range(size)], {"<s>": control}
        kinds |= {"</s>": control, "<unk>": gguf.TokenType.UNKNOWN}
        words = [f"{table_models.SPACE}{word}" for word in ("Hello", "world", "again")]
        chain = table_models.follow(tokenizer, [*words[:2], "<s>", words[2], words[2]])
        special, text, prompt = "<s>", " world", "Hello"
    options = dict(eos="</s>", kinds=kinds, scores=scores)
    file = table_models.write_gguf(tmp_path / "m.gguf", tokenizer, chain, **options)
    model = stree_jax.load(file)
    for stop, kept in ((special, text), (text[-2:] + special, text[:-2])):
        result = generated(model, prompt, stop_strings=stop)
        assert (result.texts, result.stop_reasons) == ([kept], [stop])


def test_stop_option_of_the_command(directory, capsys):
    options = ["--drafter", "none", "--max-new-tokens", "15", "--stop", "k<|im_end|>"]
    assert main(["generate", "x", "--model", str(directory), *options, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["text"] == "y"


# The server


@pytest.fixture(scope="module")
def service(directory):
    with table_server.started(table_server.table_service(directory)) as service:
        yield service


def answered(service, **options):
    body = dict(model=table_server.NAME, prompt="x", temperature=0, max_tokens=15)
    status, _, answer = table_server.ask(service, "/v1/completions", body | options)
    assert status == 200, answer
    return answer


def check_lists(text, lists):
    """Checks the lists of all chunks. Special tokens within the text are listed."""
    tokens = [token for part in lists for token in part["tokens"]]
    offsets = [place for part in lists for place in part["text_offset"]]
    shown = ["" if token in SPECIAL else token for token in tokens]
    assert "".join(shown) == text
    assert offsets == [len("".join(shown[:i])) for i in range(len(shown))]
    for name in ("token_logprobs", "top_logprobs"):
        assert sum(len(part[name]) for part in lists) == len(tokens)


def test_server_cuts_texts_and_log_probabilities_at_special_stops(service):
    for stops, expected in STOPS:
        answer = answered(service, stop=stops, logprobs=2)
        (choice,) = answer["choices"]
        assert ("x" + choice["text"], choice["finish_reason"]) == (expected, "stop")
        lists = choice["logprobs"]
        check_lists(choice["text"], [lists])
    assert answered(service, stop=["<|im_end|>"])["usage"]["completion_tokens"] == 3


def test_streamed_log_probabilities_stop_with_the_text(service):
    for stops, expected in STOPS:
        lines = answered(service, stop=stops, logprobs=0, stream=True).split("\n\n")
        parts = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        choices = [part["choices"][0] for part in parts]
        text = "".join(choice["text"] for choice in choices)
        assert "x" + text == expected
        lists = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        check_lists(text, lists)
