"""Test records of training text and prompts, in the formats of published data sets.

The expected text is written by hand: both halves of a record, every message of a chat.
"""

import gzip
import json
import zipfile

import pytest
from tokenizers import Tokenizer, models

from bench.prompts import read_prompts, read_turns
from stree_jax.cli.main import main
from stree_jax.training.corpus import encode_corpus, iter_documents
from stree_jax.training.recipe import prepare
from stree_jax.training.texts import Tally
from tests.support.table_models import byte_level, write_llama

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Ho."},
]
SHARED = [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Ho."}]
TOLD = "Be brief.\nHi?\nHo."
WHOLE = [
    ({"prompt": "def f():\n", "completion": "    return 1"}, "def f():\n    return 1"),
    ({"prompt": "2 + 2 =", "completion": " 4"}, "2 + 2 = 4"),
    ({"prompt": "What?", "response": "That."}, "What?\nThat."),
    ({"prompt": "p\n", "canonical_solution": "    x\n", "task_id": "a"}, "p\n    x\n"),
    ({"prompt": "p", "chosen": "good", "rejected": "bad"}, "p\ngood"),
    (
        {"chosen": "Human: p Assistant: good", "rejected": "b"},
        "Human: p Assistant: good",
    ),
    ({"prompt": "p", "answer": "a"}, "p\na"),
    ({"prompt": "p", "output": "o"}, "p\no"),
    ({"prompt": "", "completion": "c"}, "c"),
    ({"prompt": "p"}, "p"),
    ({"prompt": "p", "completion": None, "text": None}, "p"),
    ({"prompt": None, "completion": None, "text": "t"}, "t"),
    ({"text": "t"}, "t"),
    ({"content": "c", "lang": "python"}, "c"),
    ({"text": "t", "code": "c"}, "t\nc"),
    ({"question": "q", "answer": "48/2 = <<48/2=24>>24"}, "q\n48/2 = 24"),
    ({"question": "q", "answer": "cout << a << b >> c;"}, "q\ncout << a << b >> c;"),
    ({"instruction": "i", "input": "n", "output": "o"}, "i\nn\no"),
    ({"instruction": "i", "input": "", "output": "o"}, "i\no"),
    ({"instruction": "i", "input": None, "output": "o", "text": "all"}, "i\no"),
    ({"instruction": "i", "context": "c", "response": "r"}, "i\nc\nr"),
    ({"system_prompt": "s", "question": "q", "response": "r"}, "s\nq\nr"),
    ({"context": "c", "question": "q", "answer": "a"}, "c\nq\na"),
    ({"query": "q", "response": "r"}, "q\nr"),
    ({"problem": "p", "solution": "s"}, "p\ns"),
    ({"problem": "p", "solution": "so 4", "answer": "4"}, "p\nso 4"),
    ({"prompt": "p", "generation": "g"}, "p\ng"),
    ({"prompt": "p", "reply": "r"}, "p\nr"),
    ({"inputs": "i", "targets": "t"}, "i\nt"),
    ({"input": "i", "output": "o"}, "i\no"),
    ({"article": "a", "highlights": "h"}, "a\nh"),
    ({"messages": CHAT}, TOLD),
    ({"conversations": SHARED}, "Hi?\nHo."),
    ({"system": "Be brief.", "conversations": SHARED}, TOLD),
    ({"conversation": [{"human": "Hi?", "assistant": "Ho."}]}, "Hi?\nHo."),
    ({"conversations": ["Hi?", "Ho."]}, "Hi?\nHo."),
    ({"turns": ["a", "b"], "category": "x"}, "a\nb"),
    ({"prompt": CHAT[:2], "completion": CHAT[2:]}, TOLD),
    ({"prompt": CHAT[:2], "chosen": CHAT[2:], "rejected": CHAT[2:]}, TOLD),
    ({"prompt": "Hi?", "chosen": CHAT[1:], "rejected": CHAT[1:]}, "Hi?\nHo."),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "a"),
    ({"contents": [{"role": "user", "parts": [{"text": "Hi?"}]}]}, "Hi?"),
    ({"Question": "q", "Answer": "a"}, "q\na"),
    ({"user": "u", "assistant": "a"}, "u\na"),
    ({"user": "bob", "text": "t", "target": 4}, "t"),
    ({"prompt": "Write.", "text": "Once.", "seed_data": "s"}, "Write.\nOnce."),
    ({"prompt": "Once", "text": "Once upon."}, "Once upon."),
    ("just a text", "just a text"),
]


def written(path, *records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


@pytest.mark.parametrize(("record", "text"), WHOLE, ids=lambda x: str(x)[:40])
def test_records_are_read_whole(tmp_path, record, text):
    assert [*iter_documents([written(tmp_path / "a.jsonl", record)])] == [text]


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.ndjson", "A.JSONL", "a.json", "a.jsonl.gz", "a.json.gz"]
)
def test_mixed_records_in_every_kind_of_file(tmp_path, name):
    """With blank lines, CRLF, a UTF-8 byte order mark, and no newline at the end."""
    records = [record for record, _ in WHOLE]
    lines = "\r\n\r\n".join(map(json.dumps, records)).encode()
    data = b"\xef\xbb\xbf" + lines
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    expected = [text for _, text in WHOLE]
    assert [*iter_documents([path])] == expected
    assert [*iter_documents([tmp_path])] == expected


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"data": x}])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_json_lists(tmp_path, wrap, indent, encoding):
    """As the Alpaca and ShareGPT data are published."""
    records = [record for record, _ in WHOLE]
    text = json.dumps(wrap(records), indent=indent)
    (tmp_path / "a.json").write_text(text, encoding=encoding)
    assert [*iter_documents([tmp_path])] == [text for _, text in WHOLE]


def test_line_separators_do_not_end_a_record(tmp_path):
    text = "a\u2028b\x0cc\u0085d"
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": text}, ensure_ascii=False), "utf-8")
    assert [*iter_documents([path])] == [text]


def test_very_long_lines(tmp_path):
    text = "word " * 400_000
    path = written(tmp_path / "a.jsonl", {"prompt": text, "completion": "end"})
    pieces = [*iter_documents([path])]
    assert "".join(pieces) == text + "end"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"foo": "x", "bar": [1]}', ["a.jsonl:2: ", "foo, bar (a list)", "messages"]),
        (b'{"question": "x", "answer": 1}', ["a.jsonl:2: ", "answer (a number)"]),
        (b'{"prompt": "x", "completion": ["a", "b"]}', ["completion (a list)"]),
        (b'{"prompt": "x", "output": {"text": "y"}}', ["output (an object)"]),
        (b'{"prompt": "x", "completions": ["y"]}', ["completions (a list)"]),
        (b'{"prompt": "x", "rejected": "y"}', ["prompt, rejected"]),
        (b'{"prompt": "x", "generated": "y"}', ["prompt, generated"]),
        (b'{"prompt": "x", "ground_truth": "y"}', ["prompt, ground_truth"]),
        (b'{"role": "user", "content": "x"}', ["role, content", "messages"]),
        (b'{"question": "x"}', ["a.jsonl:2: ", "question", "answer"]),
        (b"{}", ["a.jsonl:2: ", "empty"]),
        (b"null", ["a.jsonl:2: ", "null"]),
        (b"[1]", ["a.jsonl:2: ", "a list"]),
        (b'{"messages": [{"role": "user"}]}', ["messages[0]", "null"]),
        (
            b'{"messages": [{"text": "user"}]}',
            ["messages[0]", "role", "in the keys text"],
        ),
        (b'{"messages": [3]}', ["messages[0]", "a number"]),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            ["messages[0]", "image_url"],
        ),
        (b'{"text": "a", "text": "b"}', ["a.jsonl:2: ", "'text'", "twice"]),
        (b'{"text": "\xe9"}', ["a.jsonl:2: ", "not UTF-8", "iconv"]),
        (b'{"text": "a"', ["a.jsonl:2: ", "not JSON"]),
        (b"[" * 100_000, ["a.jsonl:2: ", "not JSON"]),
    ],
)
def test_unknown_records_are_refused_with_their_line(tmp_path, line, said):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:2") as caught:
        [*iter_documents([path])]
    for part in said:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("a.parquet", "JSON Lines"),
        ("a.CSV", "JSON Lines"),
        ("a.tar.gz", "unpack"),
        ("a.jsonl.zst", "unpack"),
        ("README", ".txt"),
    ],
)
def test_unsupported_files_are_refused_with_advice(tmp_path, name, way):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=f"{name}: not one of .*{way}"):
        iter_documents([tmp_path / name])


def test_skipped_files_and_fields_are_reported(tmp_path):
    folder = tmp_path / "data"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git/config").write_text("hidden")
    (folder / "a.txt").write_bytes(b"caf\xe9")
    (folder / "b.parquet").write_bytes(b"PAR1")
    (folder / "empty.md").write_text(" \n")
    (folder / "package.json").write_text('{"name": "x", "version": "1"}')
    written(
        folder / "c.jsonl",
        {"prompt": "p", "completion": "c", "rejected": "r", "id": 1},
        {"messages": [{**CHAT[1], "weight": 0}, CHAT[2]]},
        {"text": ""},
    )
    (folder / "link").symlink_to(tmp_path)
    with zipfile.ZipFile(folder / "z.zip", "w") as archive:
        archive.writestr("in/a.md", "from a zip")
        archive.writestr("in/b.jsonl", '{"text": "t"}\n')
        archive.writestr("in/c.png", "no")
        archive.writestr("tests/d.py", "no")
    tally = Tally()
    documents = [*iter_documents([folder], tally)]
    assert documents == ["caf\xe9", "p\nc", "Hi?\nHo.", "from a zip", "t"]
    said = "\n".join(tally.lines())
    sizes = [f.stat().st_size for f in folder.iterdir() if f.is_file()]
    parquet = (folder / "b.parquet").stat().st_size
    assert f"read 5 files ({sum(sizes) - parquet:,} bytes)" in said
    for part in (
        "3 texts and 4 records",
        "1 of prompt + completion",
        "1 of messages",
        "rejected (1)",
        "id (1)",
        "message weight (1)",
        "1 conversations are joined without their roles",
        "2 blank",
        "a.txt",
        "Latin-1",
        "b.parquet",
        ".git/config",
        "package.json",
        "data/link",
        "in/c.png",
        "tests/d.py",
    ):
        assert part in said, part


TEMPLATE = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def target(tmp_path):
    """Returns a chat model of 512 tokens whose template is ChatML."""
    config, tokenizer = {"eos_token_id": 4}, byte_level()
    path = write_llama(tmp_path / "model", 512, tokenizer=tokenizer, config=config)
    settings = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def test_chats_use_the_chat_template_of_the_target(
    tmp_path, target, monkeypatch, capsys
):
    """Special tokens of the template become tokens; in plain text they stay text."""
    chats = [{"messages": CHAT}, {"conversations": SHARED}] * 100
    odd = {"messages": [*CHAT, {"role": "narrator", "content": "Curtain."}]}
    text = written(tmp_path / "chats.jsonl", *chats, odd, {"text": "<|im_end|>"})
    seen = []

    def examples(config, train, tokens, heldout):
        seen.extend([*tokens.tolist(), *heldout.tolist()])
        raise ValueError("read enough")

    monkeypatch.setattr("stree_jax.training.distill.text_examples", examples)
    out, work = tmp_path / "out", tmp_path / "work"
    options = f"--text {text} --out {out} --work {work} --steps 1 --width 64"
    assert main(["distill", "--target", str(target), *options.split()]) == 2
    start, end = 3, 4
    turns = 100 * (3 + 2) + 3
    assert seen.count(start) == turns
    # The extra one ends the plain text; a chat ends with its own
    assert seen.count(end) == turns + 1
    err = capsys.readouterr().err
    assert "read enough" in err
    assert "leaves out messages, by role: narrator (1)" in err
    assert "without their roles" not in err


def test_a_template_error_names_the_record(tmp_path):
    def spell(messages):
        raise ValueError("chat template: System role not supported")

    path = written(tmp_path / "a.jsonl", {"text": "t"}, {"messages": CHAT})
    with pytest.raises(ValueError, match=r"a\.jsonl:2: chat template: System role"):
        [*iter_documents([path], spell=spell)]


def test_vocabularies_beyond_16_bits():
    """Llama 3 has 128,256 tokens, Qwen2.5 151,936."""
    names = {f"t{i}": i for i in range(151_936)}
    tokenizer = Tokenizer(models.WordLevel(names))
    assert encode_corpus(["t151935"], tokenizer, 2).tolist() == [151_935, 2]


PROMPTS = [
    ({"prompt": "def f():\n", "canonical_solution": "    return 1"}, "def f():\n"),
    ({"prompt": "p", "completion": "c"}, "p"),
    ({"question": "q", "answer": "a"}, "q\n"),
    ({"turns": ["a", "b"], "reference": ["x"]}, "a\n"),
    ({"instruction": "i", "input": "n", "output": "o"}, "i\nn\n"),
    ({"messages": CHAT}, "Be brief.\nHi?\n"),
    ({"conversations": SHARED}, "Hi?\n"),
    ({"prompt": CHAT[:2], "completion": CHAT[2:]}, "Be brief.\nHi?\n"),
    ({"text": "t", "code": "c"}, "t\n"),
    ({"query": "q", "response": None}, "q\n"),
    ("p", "p"),
]


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz", "p.json"])
def test_prompts_are_the_first_half_of_a_record(tmp_path, name):
    records = [record for record, _ in PROMPTS]
    lines = "\n".join(map(json.dumps, records)).encode()
    data = json.dumps(records).encode() if name == "p.json" else lines
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    expected = [prompt for _, prompt in PROMPTS]
    assert read_prompts([path], 99) == {name: expected}


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"text": "a whole text"}, "keys text"),
        ({"completion": "c"}, "keys completion"),
        ({"prompt": 3}, "prompt (a number)"),
        ({"turns": []}, "turns (a list)"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages (a list)"),
        ([1], "a list"),
    ],
)
def test_records_without_a_prompt_are_refused(tmp_path, record, said):
    path = written(tmp_path / "p.jsonl", {"prompt": "fine"}, record)
    with pytest.raises(ValueError, match=r"p\.jsonl:2: no prompt") as caught:
        read_prompts([path], 2)
    assert said in str(caught.value)


def test_prompt_files_with_the_same_name_are_both_read(tmp_path):
    paths = []
    for name in "ab":
        (tmp_path / name).mkdir()
        paths.append(written(tmp_path / name / "test.jsonl", {"question": name}))
    assert read_prompts(paths, 1) == {str(p): [f"{p.parent.name}\n"] for p in paths}
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl: no records"):
        read_prompts([tmp_path / "empty.jsonl"], 1)


def test_user_turns_of_chats_are_read(tmp_path):
    more = {"from": "human", "value": "More?"}
    path = written(
        tmp_path / "a.jsonl",
        {"turns": ["a", "b"]},
        {"conversations": [*SHARED, more]},
        {"messages": CHAT},
        {"prompt": "p"},
    )
    assert read_turns([path], 9) == [["a\n", "b\n"], ["Hi?\n", "More?\n"]]


def test_special_tokens_spelled_in_texts_are_reported(tmp_path, capsys):
    """Some data sets were passed through a chat template before publication."""
    told = "<|im_start|>user\nHi<|im_end|>\n"
    path = written(tmp_path / "a.jsonl", *[{"text": told * 100}] * 3, {"text": "<s>"})
    data = prepare([path], byte_level(), end=2)
    assert 4 not in [*data.train, *data.heldout]
    said = "special tokens in plain text are read as text: <|im_start|> (3), <s> (1)"
    assert said in capsys.readouterr().err


def test_roles_and_empty_fields(tmp_path):
    """Role names in capitals are accepted. Empty fields are not reported as unread."""
    seen, tally = [], Tally()
    turns = [{"from": "Human", "value": "a"}, {"from": "GPT", "value": "b"}]
    path = written(
        tmp_path / "a.jsonl",
        {"system": "", "conversations": turns, "tools": []},
        {"instruction": "i", "input": "", "output": "o"},
        {"messages": []},
        {"turns": ["a", "b"]},
    )

    def spell(messages):
        seen.append([message["role"] for message in messages])
        return "/".join(message["content"] for message in messages)

    assert [*iter_documents([path], tally, spell)] == ["a/b", "i\no", "a\nb"]
    assert seen == [["user", "assistant"]]
    assert not tally.unread
    assert tally.blank == 1


@pytest.mark.parametrize("text", ["", "\n \n", None])
def test_a_folder_without_text_is_refused(tmp_path, capsys, text):
    folder = tmp_path / "data"
    folder.mkdir()
    if text is not None:
        (folder / "a.txt").write_text(text)
    (folder / "b.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="no text in .*data"):
        prepare([folder], byte_level(), end=2)
    assert "b.bin" in capsys.readouterr().err


def test_prepared_tokens_mixed_with_texts_are_refused(tmp_path):
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair/train.npy").write_bytes(b"")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(
        ValueError, match="pair: a folder of prepared tokens; it must be the only path"
    ):
        iter_documents([tmp_path / "a.txt", tmp_path / "pair"])
