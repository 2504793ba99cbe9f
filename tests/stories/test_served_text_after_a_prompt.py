"""Test that texts from the server continue their prompts, whole and streamed."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

import stree_jax
from stree_jax.sampling.continuation import continuation
from stree_jax.server.batch import Batch
from stree_jax.server.rows import RowUpdate, Sizes
from stree_jax.server.texts import Writer
from stree_jax.speculation.decoding import OUT_OF_LENGTH, RUNNING
from stree_jax.speculation.default_tree import spec_for
from tests.server.served import ask, reader_of, service_of
from tests.support.table_models import SPACE, byte_level, follow, spm, write_llama

NAMES = [f"{SPACE}{word}" for word in ("Hello", "world", "again")]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    tokenizer = spm()
    chain = follow(tokenizer, [*NAMES, "</s>"])
    chain[1] = tokenizer.token_to_id(NAMES[1])  # after <s>
    place = tmp_path_factory.mktemp("model") / "llama"
    write_llama(place, len(chain), tokenizer=tokenizer, chain=chain)
    sizes = Sizes(rows=2, context=64, steps=1, top_logprobs=2)
    model = stree_jax.load(place)
    batch = Batch(model, spec_for(model, None, None, None, None), sizes)
    batch.clear()

    def spell(messages, turn):
        return model.tokenizer.encode(" ".join(m["content"] for m in messages)).ids

    service = service_of(batch, spell=spell)
    yield service
    assert service.engine.stop()


def completion(service, **options):
    body = dict(model="tiny", prompt="Hello", temperature=0, max_tokens=2)
    status, _, answer = ask(service, "/v1/completions", body | options)
    assert status == 200, answer
    return answer


def test_completion_continues_its_prompt(service):
    assert completion(service)["choices"][0]["text"] == " world again"
    assert completion(service, stop="again")["choices"][0]["text"] == " world "
    prompts = ["Hello", "Hello world", [1]]
    answer = completion(service, prompt=prompts, max_tokens=1)
    texts = [choice["text"] for choice in answer["choices"]]
    # The last prompt has no text before the answer
    assert texts == [" world", " again", "world"]


@pytest.mark.parametrize("prompt", ["Hello", [1]])
def test_logprob_tokens_and_offsets_match_the_text(service, prompt):
    answer = completion(service, prompt=prompt, logprobs=2)
    (choice,) = answer["choices"]
    text, lists = choice["text"], choice["logprobs"]
    assert text == (" world again" if prompt == "Hello" else "world again")
    assert "".join(lists["tokens"]) == text
    assert lists["text_offset"] == [0, text.index(" again")]
    for token, top in zip(lists["tokens"], lists["top_logprobs"], strict=True):
        assert token in top


def test_stream_continues_its_prompt(service):
    lines = completion(service, stream=True).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    parts = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    texts = [part["choices"][0]["text"] for part in parts]
    assert [text for text in texts if text] == [" world", " again"]


def test_chat_continues_its_prompt(service):
    said = [{"role": "user", "content": "Hello"}]
    options = dict(model="tiny", messages=said, temperature=0, max_tokens=2)
    lists = dict(logprobs=True, top_logprobs=1)
    _, _, answer = ask(service, "/v1/chat/completions", options | lists)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == " world again"
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert tokens == [" world", " again"]


def test_a_character_split_between_prompt_and_text_is_streamed_whole():
    class Model:
        tokenizer = byte_level()

    ids = Model.tokenizer.encode("日x").ids
    after = continuation(Model.tokenizer, ids[:1])
    writer = Writer(reader_of(Model), after=after)
    texts = []
    for token in ids[1:]:
        news = RowUpdate([token], np.zeros(1, np.uint8), 1, RUNNING)
        texts.append(writer.write(news).text)
    assert texts == ["", "日", "x"]


def test_token_texts_of_any_decoder_join_to_the_text():
    """WordPiece tokens have no byte values; their texts are parts of the decoded
    text."""

    class Model:
        tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "c": 3}))

    Model.tokenizer.decoder = decoders.WordPiece()
    for prompt, expected in (([1], [" c", "b", " c"]), ([], ["c", "b", " c"])):
        after = continuation(Model.tokenizer, prompt)
        writer = Writer(reader_of(Model), top=1, after=after)
        lists = np.zeros(3, np.float32), np.zeros((3, 1), np.float32)
        origins, others = np.zeros(3, np.uint8), np.array([[1], [2], [2]])
        news = RowUpdate([3, 2, 3], origins, 1, OUT_OF_LENGTH, *lists, others)
        piece = writer.write(news)
        assert piece.text == "".join(expected)
        assert [c.token.name.decode() for c in piece.logprobs] == expected
        likeliest = [c.top[0][0].name.decode() for c in piece.logprobs]
        assert likeliest == [expected[0].replace("c", "a"), "b", "b"]
