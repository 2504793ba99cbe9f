"""Test that a model's text continues its prompt without a lost space or character.

SentencePiece tokenizers strip the first space of the text that they decode. The
expected text is what the tokenizers library decodes from the whole sequence, minus the
prompt.
"""

import io
import json
from dataclasses import replace

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre

import stree_jax
from stree_jax.cli import conversation
from stree_jax.cli.main import main
from stree_jax.generation.result import runs_by_origin
from stree_jax.sampling.continuation import continuation, encode_continuation
from tests.support.table_models import (
    SPACE,
    byte_level,
    follow,
    padded_size,
    spm,
    write_gguf,
    write_llama,
)

HELLO, WORLD, AGAIN = (f"{SPACE}{word}" for word in ("Hello", "world", "again"))
BYTES = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]


def metaspace(scheme, decoder=None):
    tokenizer = spm()
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoder or decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


def unstripped():
    tokenizer = spm()
    tokenizer.decoder = decoders.Sequence(BYTES)
    return tokenizer


KINDS = {
    "sentencepiece": spm,
    "sentencepiece that keeps the first space": unstripped,
    "metaspace always": lambda: metaspace("always"),
    "metaspace first": lambda: metaspace("first"),
    "metaspace never": lambda: metaspace("never"),
    "metaspace and bytes": lambda: metaspace("first", decoders.Sequence(BYTES)),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Returns a model with the greedy text "Hello world again"."""
    tokenizer = spm()
    chain = follow(tokenizer, [HELLO, WORLD, AGAIN, "</s>"])
    place = tmp_path_factory.mktemp("model") / "llama"
    return write_llama(place, len(chain), tokenizer=tokenizer, chain=chain)


@pytest.fixture(scope="module")
def model(path):
    return stree_jax.load(path)


@pytest.mark.parametrize("kind", KINDS)
def test_text_keeps_the_space_after_the_prompt(model, kind):
    tokenizer = KINDS[kind]()
    # "never" puts no space before a prompt, so this prompt is the token itself.
    prompt = [tokenizer.token_to_id(HELLO)] if "never" in kind else "Hello"
    own = replace(model, tokenizer=tokenizer)
    result = stree_jax.generate(own, [prompt], max_new_tokens=5)
    ids = [tokenizer.token_to_id(name) for name in (HELLO, WORLD, AGAIN, "</s>")]
    assert result.tokens == [ids[1:]]
    assert result.texts == [" world again"]
    assert tokenizer.decode(ids[:1]) + result.texts[0] == tokenizer.decode(ids)


def test_stream_continues_the_prompt(model):
    items = list(stree_jax.stream(model, "Hello", max_new_tokens=5, steps=1))
    news = [item.new_texts[0] for item in items]
    assert "".join(news) == " world again" == items[-1].texts[0]
    assert news[:2] == [" world", " again"]


@pytest.mark.parametrize(
    ("stop", "text"),
    [("again", " world "), (" again", " world"), ("world", " "), (" world", "")],
)
def test_text_before_a_stop_string_continues_the_prompt(model, stop, text):
    options = {"max_new_tokens": 5, "stop_strings": stop}
    result = stree_jax.generate(model, "Hello", **options)
    assert (result.texts, result.stop_reasons) == ([text], [stop])
    *_, last = items = list(stree_jax.stream(model, "Hello", steps=1, **options))
    assert "".join(item.new_texts[0] for item in items) == text == last.texts[0]


@pytest.mark.parametrize("more", [[[]], [""]])
def test_text_continues_a_cached_state(model, more):
    first = stree_jax.generate(model, "Hello", max_new_tokens=1, keep_past=True)
    then = stree_jax.generate(model, more, max_new_tokens=1, past=first.past)
    assert first.texts + then.texts == [" world", " again"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_after_a_cached_state_gets_no_extra_space(model, kind):
    """The tokens are those of the whole text encoded at once."""
    tokenizer = KINDS[kind]()
    own = replace(model, tokenizer=tokenizer)
    hello = [tokenizer.token_to_id(HELLO)]
    first = stree_jax.generate(own, [hello], max_new_tokens=1, keep_past=True)
    then = stree_jax.generate(
        own, " world", max_new_tokens=1, past=first.past, keep_past=True
    )
    ids = [tokenizer.token_to_id(n) for n in (HELLO, WORLD, WORLD, AGAIN)]
    assert then.past.tokens == [ids]
    assert then.texts == [" again"]


def test_each_row_continues_its_own_prompt(model):
    prompts = ["Hello", [1], "world Hello", "Hello world"]
    result = stree_jax.generate(model, prompts, max_new_tokens=1, n=2)
    texts = [" world", "", " world", " again"]  # <unk> follows <s>
    assert result.texts == [text for text in texts for _ in range(2)]


def test_text_after_special_tokens_begins_without_a_space():
    """As the tokenizer decodes the whole sequence. vLLM does the same."""
    tokenizer = spm()
    ids = [tokenizer.token_to_id(name) for name in (WORLD, AGAIN)]
    assert continuation(tokenizer, [1]).decode(ids) == "world again"
    assert continuation(tokenizer, []).decode(ids) == "world again"
    assert tokenizer.decode([1, *ids]) == "world again"


# --- the command line -----------------------------------------------------------------


def run(capsys, *args):
    code = main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def test_command_prints_prompt_and_text(path, capsys):
    generate = "generate", "Hello", "--model", path, "--drafter", "none"
    out = run(capsys, *generate, "--max-new-tokens", 5)
    assert out.startswith("Hello world again\n[")
    out = run(capsys, *generate, "--max-new-tokens", 5, "--explain")
    assert out.startswith("Hello world again\n[")
    out = run(capsys, *generate, "--max-new-tokens", 5, "--n", 2)
    assert out.startswith("Hello world again\n--------\nHello world again\n----")
    out = run(capsys, *generate, "--max-new-tokens", 5, "--stop", "gain", "--json")
    assert json.loads(out)["text"] == " world a"


def test_texts_by_origin_continue_the_prompt():
    tokenizer = spm()
    ids = [tokenizer.token_to_id(name) for name in (HELLO, WORLD, AGAIN)]
    decoder = continuation(tokenizer, ids[:1])
    assert runs_by_origin(decoder, ids[1:], [1, 0]) == [(" world", 1), (" again", 0)]


@pytest.mark.parametrize(
    ("stop", "printed"), [("again", "Hello world "), ("o", "Hello w")]
)
def test_an_explained_text_ends_before_the_stop_string(path, capsys, stop, printed):
    argv = "generate", "Hello", "--model", path, "--drafter", "none", "--stop", stop
    assert run(capsys, *argv, "--explain").split("\n")[0] == printed
    assert run(capsys, *argv).split("\n")[0] == printed


def test_gguf_text_continues_the_prompt(tmp_path):
    tokenizer = spm()
    names = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    chain = follow(tokenizer, [HELLO, WORLD, AGAIN, "</s>"])
    kinds = {name: gguf.TokenType.BYTE for name in names if name.startswith("<0x")}
    kinds |= dict.fromkeys(("<s>", "</s>"), gguf.TokenType.CONTROL)
    kinds["<unk>"] = gguf.TokenType.UNKNOWN
    scores = [-float(number) for number in range(len(names))]
    options = {"eos": "</s>", "kinds": kinds, "scores": scores}
    file = write_gguf(tmp_path / "m.gguf", tokenizer, chain, **options)
    model = stree_jax.load(file)
    result = stree_jax.generate(model, "Hello", max_new_tokens=5)
    assert result.texts == [" world again"]


# --- any tokenizer, any tokens --------------------------------------------------------


def word_piece():
    names = ["[UNK]", "[CLS]", "[SEP]", "a", "##b", "c", ".", "##é", "'s", "日"]
    tokenizer = Tokenizer(models.WordPiece({n: i for i, n in enumerate(names)}))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(names[:3])
    return tokenizer


def bpe_words():
    names = ["a</w>", "b", "c</w>", "d", "e</w>"]
    tokenizer = Tokenizer(models.BPE({n: i for i, n in enumerate(names)}, []))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return tokenizer


def no_decoder():
    return Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, " d": 3}))


def ctc():
    names = ["<pad>", "|", "a", "b", "c"]
    tokenizer = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}))
    tokenizer.decoder = decoders.CTC()
    return tokenizer


OTHERS = {
    "byte-level": byte_level,
    "word piece": word_piece,
    "suffixes": bpe_words,
    "no decoder": no_decoder,
    "ctc": ctc,
}
ALL = {name: make() for name, make in (KINDS | OTHERS).items()}
SIZES = {name: padded_size(tokenizer) for name, tokenizer in ALL.items()}
DRAWN = st.lists(st.integers(0, 399), max_size=40)
# Whole characters in both vocabularies, without the bytes above ASCII.
WHOLE = st.one_of(st.integers(0, 99), st.integers(259, 287))
WHOLES = st.lists(WHOLE, max_size=40)


@settings(max_examples=400)
@given(st.sampled_from(sorted(ALL)), DRAWN, DRAWN)
def test_text_is_the_decoded_sequence_without_the_prompt(name, prompt, more):
    tokenizer, size = ALL[name], SIZES[name]
    prompt, more = ([i % size for i in ids] for ids in (prompt, more))
    whole, before = tokenizer.decode([*prompt, *more]), tokenizer.decode(prompt)
    text = continuation(tokenizer, prompt).decode(more)
    assert whole.endswith(text)
    if whole.startswith(before):
        assert before + text == whole
    else:  # an incomplete character, or byte tokens that no longer form one
        assert "\ufffd" in before + whole


@settings(max_examples=300)
@given(st.sampled_from(sorted(ALL)), WHOLES, WHOLES)
def test_text_matches_decode_stream_of_the_tokenizers_library(name, prompt, more):
    """vLLM streams with this decoder, which holds back incomplete characters."""
    tokenizer, size = ALL[name], SIZES[name]
    prompt, more = ([i % size for i in ids] for ids in (prompt, more))
    if "\ufffd" in tokenizer.decode([*prompt, *more]) or not prompt:
        return
    stream = decoders.DecodeStream(ids=prompt, skip_special_tokens=True)
    theirs = [stream.step(tokenizer, token) for token in more]
    text = continuation(tokenizer, prompt).decode(more)
    assert text == "".join(part or "" for part in theirs)


@settings(max_examples=200)
@given(st.sampled_from(sorted(ALL)), WHOLES)
def test_text_decoded_token_by_token_is_the_whole_text(name, tokens):
    """The joined texts of single tokens are the text of all tokens decoded at once."""
    tokenizer, size = ALL[name], SIZES[name]
    tokens = [i % size for i in tokens]
    if any("\ufffd" in tokenizer.decode(tokens[:n]) for n in range(len(tokens) + 1)):
        return
    place, text = continuation(tokenizer, []), ""
    for token in tokens:
        text += place.decode([token])
        place = place.after([token])
    assert text == tokenizer.decode(tokens)


@pytest.mark.parametrize("name", sorted(ALL))
def test_only_the_end_of_a_long_prompt_is_decoded_again(name):
    tokenizer = ALL[name]
    words = [i for i in range(SIZES[name]) if tokenizer.decode([i]).strip().isalpha()]
    prompt = (words * 1000)[:5000]
    decoder = continuation(tokenizer, prompt)
    assert len(decoder.context) <= 16
    whole = tokenizer.decode([*prompt, *words])
    assert tokenizer.decode(prompt) + decoder.decode(words) == whole


def bytes_of(tokenizer, data):
    return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]


@pytest.mark.parametrize("make", [spm, byte_level])
@pytest.mark.parametrize("cut", [1, 2])
def test_a_character_split_between_prompt_and_text(make, cut):
    tokenizer = make()
    if make is spm:
        ids = bytes_of(tokenizer, "日".encode())
    else:
        ids = tokenizer.encode("日").ids
    start = tokenizer.encode("Hello Hello").ids
    decoder = continuation(tokenizer, [*start, *ids[:cut]])
    assert decoder.decode([]) == ""
    assert decoder.decode(ids[cut:]) == "日"
    assert decoder.decode([*ids[cut:], *ids]) == "日日"


def test_a_stream_completes_the_character_of_its_prompt(tmp_path):
    """The character has three tokens, and the prompt ends with the first one."""
    tokenizer = byte_level()
    ids = tokenizer.encode("日").ids
    chain = follow(tokenizer, [*ids, tokenizer.token_to_id("ab"), "<|im_end|>"])
    chain[4] = 2  # <|im_end|>, </s>
    path = write_llama(tmp_path / "m", len(chain), tokenizer=tokenizer, chain=chain)
    model = stree_jax.load(path)
    prompt = [[*tokenizer.encode("x").ids, *ids[:1]]]
    items = list(stree_jax.stream(model, prompt, max_new_tokens=9, steps=1))
    assert [item.new_texts[0] for item in items] == ["", "日", "ab", "", ""]
    assert items[-1].texts == ["日ab"]


def test_a_malformed_byte_does_not_repeat_the_prompt():
    """ByteFallback turns the prompt's bytes into replacement characters too, but these
    do not appear in the text."""
    tokenizer = spm()
    ids, (wrong,) = bytes_of(tokenizer, "日本".encode()), bytes_of(tokenizer, b"\xff")
    decoder = continuation(tokenizer, [*tokenizer.encode("Hello").ids, *ids])
    assert decoder.decode([wrong, tokenizer.token_to_id(WORLD)]) == "\ufffd world"
    assert decoder.decode(ids) == "日本"


# --- prompts that continue a text -----------------------------------------------------


def test_continuing_text_is_encoded_without_a_leading_space():
    tokenizer = spm()
    assert encode_continuation(tokenizer, " world") == [tokenizer.token_to_id(WORLD)]
    ids = encode_continuation(tokenizer, "world")
    assert tokenizer.decode([3 + 256, *ids]) == "world"  # after a space token
    assert [tokenizer.id_to_token(i) for i in ids] == [*"world"]
    prefixed = byte_level()
    prefixed.pre_tokenizer = pre.ByteLevel(add_prefix_space=True)
    assert prefixed.decode(prefixed.encode("a").ids) == " a"
    assert prefixed.decode(encode_continuation(prefixed, "a")) == "a"
    stripped = byte_level()
    stripped.normalizer = normalizers.Strip()
    assert stripped.decode(encode_continuation(stripped, " a")) == " a"
    split = spm()
    split.encode_special_tokens = True  # split_special_tokens of tokenizer_config.json
    assert split.decode(encode_continuation(split, "a<s>")) == "a<s>"
    plain = byte_level()
    plain.add_tokens([AddedToken("<x>", special=True)])
    assert encode_continuation(plain, "ab<x>") == plain.encode("ab<x>").ids


# --- chats ----------------------------------------------------------------------------


CHAT = """{% for m in messages %}{{ m.role + ':SPACE' + m.content + '\n' }}\
{% endfor %}{{ 'assistant:' }}"""


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """Returns a model that says "world again" after every colon, which is a byte
    token."""
    tokenizer = spm()
    chain = follow(tokenizer, ["<0x3A>", WORLD, AGAIN, "</s>"])
    place = tmp_path_factory.mktemp("model") / "talker"
    return write_llama(place, len(chain), tokenizer=tokenizer, chain=chain)


@pytest.mark.parametrize("space", ["", " "])
def test_a_chat_prints_the_text_and_keeps_its_cached_state(
    talker, capsys, monkeypatch, space
):
    """The second turn prefills only new tokens, wherever the template puts spaces."""
    tokenizer, template = spm(), CHAT.replace("SPACE", space)
    (talker / "chat_template.jinja").write_text(template)
    read, real = [], conversation.stream

    def recorded(model, prompts, **options):
        read.append((prompts[0], options["past"] is not None))
        return real(model, prompts, **options)

    monkeypatch.setattr(conversation, "stream", recorded)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nHello\n/exit\n"))
    chat = "chat", "--model", talker, "--drafter", "none", "--max-new-tokens", 2
    assert run(capsys, *chat) == " world again\n" * 2
    (first, _), (second, continued) = read
    assert tokenizer.decode(first) == f"user:{space}Hello\nassistant:"
    assert continued
    said = [tokenizer.token_to_id(name) for name in (WORLD, AGAIN)]
    turn = f"user:{space}Hello\nassistant:"
    assert tokenizer.decode([*first, *said, *second]) == f"{turn} world again\n{turn}"
