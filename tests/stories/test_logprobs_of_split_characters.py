"""Log-probabilities of the server where tokens are parts of a character, special, or
cut by a stop string. The model follows a table, so each text is known by hand."""

import pytest

import stree_jax
from tests.support import table_models, table_server
from tests.support.pieces import spelled

EMOJI = "\U0001f642"
BYTES = EMOJI.encode()  # four byte tokens: f0 9f 99 82


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Serves a model that continues a newline with the emoji, b, c, xyz and the end of
    turn. After the emoji, the likeliest tokens besides b are single bytes."""
    tokenizer = table_models.byte_level(more=["xyz"])
    letters = [spelled(bytes([byte])) for byte in BYTES]
    names = [spelled(b"\n"), *letters, "b", "c", "xyz", "<|im_end|>", "x"]
    chain = table_models.follow(tokenizer, names)
    last = tokenizer.token_to_id(letters[-1])
    parts = [tokenizer.token_to_id(spelled(bytes([byte]))) for byte in (*BYTES, 0xC3)]
    also = [(last, part, 0.9 - i / 10) for i, part in enumerate(parts)]
    end = tokenizer.token_to_id("<|im_end|>")
    options = dict(tokenizer=tokenizer, chain=chain, config={"eos_token_id": end})
    folder = tmp_path_factory.mktemp("split") / "model"
    path = table_models.write_llama(folder, len(chain), also=also, **options)
    (path / "chat_template.jinja").write_text(table_server.CHATML)
    sized = table_server.table_service(path, top=5)
    with table_server.started(sized) as service:
        yield service


def choice_of(service, kind="completions", **options):
    body = dict(model=table_server.NAME, temperature=0, max_tokens=12)
    if kind == "completions":
        body |= dict(prompt="\n", logprobs=5)
    else:
        body |= dict(logprobs=True, top_logprobs=5)
        body |= dict(messages=[{"role": "user", "content": "x"}])
    status, _, answer = table_server.ask(service, f"/v1/{kind}", body | options)
    assert status == 200, answer
    return answer["choices"][0]


def test_offsets_count_characters_of_the_text(service):
    choice = choice_of(service)
    assert choice["text"] == EMOJI + "bcxyz"
    lists = choice["logprobs"]
    assert lists["text_offset"] == [0, 0, 0, 0, 1, 2, 3, 6]
    names = [rf"bytes:\x{byte:02x}" for byte in BYTES]
    assert lists["tokens"] == [*names, "b", "c", "xyz", "<|im_end|>"]


def test_all_alternatives_are_listed_where_tokens_split_characters(service):
    after = choice_of(service)["logprobs"]["top_logprobs"][4]
    parts = [rf"bytes:\x{byte:02x}" for byte in BYTES]
    assert list(after) == ["b", *parts]
    assert sorted(after.values(), reverse=True) == list(after.values())


def test_offsets_continue_from_chunk_to_chunk(service):
    lines = table_server.ask(
        service,
        "/v1/completions",
        dict(model=table_server.NAME, prompt="\n", temperature=0, logprobs=0)
        | dict(max_tokens=12, stream=True),
    )[2]
    parts = [table_server.json.loads(line[6:]) for line in lines.split("\n\n")[:-2]]
    lists = [part["choices"][0]["logprobs"] for part in parts]
    offsets = [place for part in lists if part for place in part["text_offset"]]
    assert offsets == [0, 0, 0, 0, 1, 2, 3, 6]


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (None, EMOJI + "bcxyz"),
        (["yz"], EMOJI + "bcx"),
        (["c"], EMOJI + "b"),
        (["cx"], EMOJI + "b"),
        (["z<|im_end|>"], EMOJI + "bcxy"),
        (["<|im_end|>"], EMOJI + "bcxyz"),
        ([EMOJI + "b"], ""),
    ],
)
def test_bytes_of_a_chat_join_to_its_content(service, stop, text):
    choice = choice_of(service, "chat/completions", stop=stop)
    entries = choice["logprobs"]["content"]
    assert choice["message"]["content"] == text
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == text.encode()
    ends = [entry["token"] for entry in entries if not entry["bytes"]]
    assert ends == (["<|im_end|>"] if stop is None else [])


def test_ids_without_a_text_have_log_probabilities(tmp_path):
    """The model continues x with ids that the tokenizer does not have."""
    tokenizer = table_models.byte_level()
    size = table_models.padded_size(tokenizer)
    unnamed = list(range(len(tokenizer.get_vocab()), size))
    assert len(unnamed) >= 3
    chain = table_models.follow(tokenizer, ["x", *unnamed[:2], "y"])
    also = [(tokenizer.token_to_id("x"), n, 0.5) for n in unnamed[1:3]]
    options = dict(tokenizer=tokenizer, chain=chain, also=also)
    path = table_models.write_llama(tmp_path / "model", size, **options)
    result = stree_jax.generate(
        stree_jax.load(path), "x", max_new_tokens=3, logprobs=3, drafter=None
    )
    assert result.texts == ["y"]
    with table_server.started(table_server.table_service(path, top=3)) as service:
        for stop in (None, ["never"]):
            choice = choice_of(service, prompt="x", max_tokens=3, logprobs=3, stop=stop)
            assert choice["text"] == "y"
            lists = choice["logprobs"]
            assert lists["tokens"][2] == "y" and lists["text_offset"] == [0, 0, 0]
            assert [len(top) for top in lists["top_logprobs"]] == [3, 3, 3]
