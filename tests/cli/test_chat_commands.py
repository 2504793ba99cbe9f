"""Commands of `stree-jax chat` and its limits, against a model whose text is known."""

import io
import json

import pytest

from stree_jax.cli import conversation
from stree_jax.cli import main as cli
from tests.support.table_models import byte_level, follow, padded_size, write_llama

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
COUNT = "1234567890" * 40


def table(tokenizer):
    """After "a" comes "bcd" and the end; after a digit, the next one, without end."""
    chain = follow(tokenizer, [*"abcd", "</s>"], rest=2)
    digits = [tokenizer.token_to_id(digit) for digit in "01234567890"]
    for one, following in zip(digits[:-1], digits[1:], strict=True):
        chain[one] = following
    return chain


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Continues the last character of the last message."""
    tokenizer, path = byte_level(), tmp_path_factory.mktemp("models") / "llama"
    V = padded_size(tokenizer)
    write_llama(path, V, tokenizer=tokenizer, chain=table(tokenizer))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Has no template: every message ends in a newline, and "abcd" follows."""
    tokenizer, path = byte_level(), tmp_path_factory.mktemp("models") / "bare"
    chain = follow(tokenizer, ["Ċ", *"abcd", "</s>"], rest=2)
    return write_llama(path, padded_size(tokenizer), tokenizer=tokenizer, chain=chain)


@pytest.fixture
def chat(monkeypatch, capsys):
    def run(model, text, *options):
        lines = text if isinstance(text, str) else "".join(f"{x}\n" for x in text)
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        argv = ["chat", "--model", str(model), "--drafter", "none", *options]
        code = cli.main(argv)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def prompts(monkeypatch):
    """The texts that the model reads, those of its cached state included."""
    found, real = [], conversation.stream

    def recorded(model, prompts, **options):
        past = options["past"]
        ids = [*(past.tokens[0] if past else []), *prompts[0]]
        found.append(model.tokenizer.decode(ids, skip_special_tokens=False))
        return real(model, prompts, **options)

    monkeypatch.setattr(conversation, "stream", recorded)
    return found


def test_an_answer_has_no_limit_but_the_context(model, chat):
    code, out, err = chat(model, ["0", "a", "/undo", "a"], "--context", "300")
    count, after = out.splitlines()
    assert code == 0 and 160 < len(count) < 300 and COUNT.startswith(count)
    assert "cut: the context of 300 tokens is full; /undo or /clear makes room" in err
    assert "the message does not fit" in err and after == "bcd"
    assert f"[{len(count)} tokens, " in err


def test_a_cut_answer_says_so_and_more_continues_it(model, chat, tmp_path, prompts):
    file = tmp_path / "chat.json"
    lines = ["0", "/more", f"/save {file}", "a", "/more"]
    code, out, err = chat(model, lines, "--max-new-tokens", "7")
    assert (code, out) == (0, "1234567\n8901234\nbcd\n")
    assert err.count("cut after 7 tokens (max-new-tokens); /more continues") == 2
    wanted = [("user", "0"), ("assistant", "12345678901234")]
    assert [(m["role"], m["content"]) for m in json.loads(file.read_text())] == wanted
    assert prompts == ["u0", "u01234567", "u0a12345678901234ua"]
    assert "there is no unfinished answer to continue" in err


def test_an_emoji_that_two_calls_share(chat, tmp_path, monkeypatch):
    """Each call ends within a character of four byte tokens."""
    tokenizer = byte_level()
    letters = tokenizer.pre_tokenizer.pre_tokenize_str("😀")[0][0]
    chain = follow(tokenizer, ["a", *letters, "b", "</s>"], rest=2)
    path = tmp_path / "llama"
    write_llama(path, padded_size(tokenizer), tokenizer=tokenizer, chain=chain)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    # Half of the context is the longest call: two tokens
    code, out, _ = chat(path, ["a"], "--context", "5", "--max-new-tokens", "3")
    assert code == 0 and out.strip("\n�") == ""
    _, out, _ = chat(path, ["a"], "--context", "20", "--max-new-tokens", "6")
    assert out == "😀b\n"


def test_undo_goes_back_one_message_each_time(model, chat, prompts):
    lines = ["xa", "ya", "/undo", "za", "/undo", "/undo", "/undo", "wa"]
    code, out, err = chat(model, lines, "--system", "hi")
    assert (code, out) == (0, "bcd\n" * 4)
    assert prompts[0] == "shiuxa" and prompts[3] == "shiuwa"
    assert "uxa" in prompts[2] and "uya" not in prompts[2]
    assert "removed the last message and its answer: ya" in err
    assert "there is no message to remove" in err


def test_regen_draws_another_answer(model, chat, prompts):
    options = ["--temperature", "50", "--max-new-tokens", "12"]
    code, out, err = chat(model, ["a", "/regen", "/regen", "/undo"], *options)
    answers = out.splitlines()
    assert code == 0 and len(set(answers)) == len(answers) == 3
    assert prompts == ["ua"] * 3 and "temperature is 0" not in err
    assert chat(model, ["a", "/regen", "/regen"], *options)[1] == out  # by the seed


def test_nothing_to_regenerate(model, chat):
    code, out, err = chat(model, ["/regen", "/more", "/undo", "/save x"])
    assert (code, out) == (0, "")
    for text in ("answer to regenerate", "unfinished answer", "message to remove"):
        assert f"there is no {text}" in err
    assert "/save: the conversation is empty" in err


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_loaded_conversation_continues(model, chat, prompts, tmp_path, wrapped):
    file = tmp_path / "é.json"
    messages = [
        {"role": "system", "content": "hi"},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "é"},
    ]
    file.write_text(json.dumps({"messages": messages} if wrapped else messages))
    lines = ["first a", f"/load {file}", "ya", "/undo", "/undo", "/regen"]
    code, out, err = chat(model, lines)
    assert (code, out) == (0, "bcd\nbcd\n")
    assert prompts == ["ufirst a", "shiuxaéuya"] and "loaded 3 messages" in err


def test_a_loaded_question_is_answered_by_regen(model, bare, chat, prompts, tmp_path):
    file = tmp_path / "x.json"
    file.write_text('[{"role": "user", "content": "xa"}]')
    code, out, err = chat(model, [f"/load {file}", "/regen"])
    assert (code, out, prompts) == (0, "bcd\n", ["uxa"]) and "/regen writes one" in err
    messages = [("user", "x"), ("assistant", "y"), ("user", "z")]
    file.write_text(json.dumps([{"role": r, "content": c} for r, c in messages]))
    prompts.clear()
    assert chat(bare, [f"/load {file}", "/regen"])[1] == "abcd\n"
    assert prompts == ["x\nyz\n"]


WRONG = {
    "absent": (None, "No such file"),
    "no JSON": ("{", "not readable as JSON"),
    "deep": ("[" * 100000, "not readable as JSON"),
    "no list": ('{"a": 1}', "want a JSON list of messages"),
    "empty": ("[]", "want a JSON list of messages"),
    "a text": ('["x"]', "message 0: want an object"),
    "no content": ('[{"role": "user"}]', "message 0: want an object"),
    "more": ('[{"role": "user", "content": "", "x": 1}]', "message 0: want an object"),
    "parts": ('[{"role": "user", "content": []}]', "message 0: want a role"),
    "role": ('[{"role": "tool", "content": "x"}]', "message 0: want a role"),
    "list": ('[{"role": [], "content": "x"}]', "message 0: want a role"),
    "order": ('[{"role": "assistant", "content": "x"}]', "want the role user"),
    "late": (
        '[{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]',
        "message 1: want the role assistant",
    ),
    "surrogate": ('[{"role": "user", "content": "\\ud800"}]', "not UTF-8"),
}


def test_wrong_files_change_nothing(model, chat, prompts, tmp_path):
    lines = ["xa"]
    for name, (text, _) in WRONG.items():
        if text is not None:
            (tmp_path / f"{name}.json").write_text(text)
            lines.append(f"/save {tmp_path / name}.json")
        lines.append(f"/load {tmp_path / name}.json")
    lines += [f"/load {tmp_path}", "/load", "/save", f"/save {tmp_path / 'no' / 'x'}"]
    code, out, err = chat(model, [*lines, "ya"])
    assert (code, out) == (0, "bcd\nbcd\n") and prompts[1].endswith("uya")
    assert "uxa" in prompts[1]
    for name, (text, message) in WRONG.items():
        (line,) = (x for x in err.splitlines() if f"{name}.json" in x and message in x)
        assert line.startswith("stree-jax: ")
        if text is not None:
            assert (tmp_path / f"{name}.json").read_text() == text
            assert f"{name}.json: exists and is not a saved conversation" in err
    assert "name a file, such as /load chat.json" in err and "not a regular" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        f"{name}.json" for name, (text, _) in WRONG.items() if text is not None
    )


def test_a_template_can_refuse_a_loaded_conversation(bare, chat, tmp_path):
    file = tmp_path / "x.json"
    file.write_text('[{"role": "system", "content": "hi"}]')
    code, out, err = chat(bare, [f"/load {file}", "x"])
    assert (code, out) == (0, "abcd\n") and "the model has no chat template" in err


def test_settings_change_and_wrong_ones_do_not(model, chat):
    lines = ["/set max-new-tokens 2", "a", "/set max_new_tokens=off", "a"]
    lines += ["/set temperature 50", "/set seed 7", "/set top-k 1", "a", "/show"]
    wrong = {
        "temperature x": "want a number, got 'x'",
        "temperature -1": "temperature: want 0 (greedy) or",
        "temperature nan": "temperature: want 0 (greedy) or",
        "top-k 1.5": "want an integer, got '1.5'",
        "top-p 2": "top_p: want a number in",
        "max-new-tokens 0": "want at least 1 token",
        "drafter lookup": "fixed during a chat; start with --drafter",
        "colour red": "/set colour: unknown; known: temperature, top-k",
    }
    lines += [f"/set {text}" for text in wrong]
    code, out, err = chat(model, [*lines, "/set temperature", "/undo x"])
    assert (code, out) == (0, "bc\nbcd\nbcd\n")
    shown = dict(
        line.split(maxsplit=1) for line in err.splitlines() if line[:2] == "  "
    )
    assert shown["temperature"] == "50" and shown["seed"] == "7"
    assert shown["max-new-tokens"] == "off" and shown["top-p"] == "1"
    for message in wrong.values():
        assert message in err
    assert err.splitlines()[-2] == "temperature 50"
    assert err.splitlines()[-1] == "stree-jax: /undo takes no argument, got x"


@pytest.mark.parametrize(
    ("options", "piped", "prompt"),
    [
        (["-p", "x\ny"], "", "ux\ny"),
        (["-p", "x"], "1\n2\n", "ux\n\n1\n2"),
        (["--file", "FILE"], "unread\n", "uf\n/bye"),
        (["-p", "x", "--file", "FILE"], "", "ux\n\nf\n/bye"),
        (["--file", "-"], "/help\n1\n", "u/help\n1"),
        (["-p", "x", "--file", "-"], "1\n", "ux\n\n1"),
    ],
)
def test_one_message(model, chat, prompts, tmp_path, options, piped, prompt):
    file = tmp_path / "file"
    file.write_text("f\n/bye\n")
    words = [str(file) if word == "FILE" else word for word in options]
    code, _, err = chat(model, piped, *words, "--max-new-tokens", "1")
    assert code == 0 and prompts == [prompt] and "reading messages" not in err


def test_one_message_that_does_not_fit_or_is_empty(model, chat):
    code, out, err = chat(model, "", "-p", "x" * 99, "--context", "64")
    assert (code, out) == (2, "") and "the message does not fit" in err
    code, out, err = chat(model, "", "-p", " \n")
    assert (code, out) == (
        2,
        "",
    ) and "the message of --prompt and --file is empty" in err


def test_generate_prints_speeds_on_stderr(model, capsys):
    argv = ["generate", "xa", "--model", str(model), "--drafter", "none"]
    assert cli.main(argv) == 0
    out, err = capsys.readouterr()
    assert out.startswith("xabcd\n[4 tokens")
    assert "prompt: 2 tokens, " in err and err.count(" tokens/s") == 2
    assert "text: 4 tokens, " in err and err.endswith("without compilation]\n")
    for option in ("--json", "--compare"):
        cli.main([*argv[:-1], "lookup", option])
        assert "prompt: " not in "".join(capsys.readouterr())
