"""Results in an interactive session: one screen of text, and HTML in a notebook."""

import copy
import dataclasses
import pickle
import re
from html.parser import HTMLParser

import jax
import numpy as np
import pytest

import stree_jax
from stree_jax.generation import notebook, result
from stree_jax.sizing.traffic import Traffic
from stree_jax.speculation.tree import chain, make_tree
from tests.support.table_models import byte_level, follow, padded_size, write_llama
from tests.support.tiny import tiny

LOOP = "<b>&amp;'\""  # a text in which lookup finds matches, and that HTML must escape


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A llama that repeats LOOP and never ends."""
    tokenizer = byte_level()
    chain = follow(tokenizer, [*LOOP, LOOP[0]])
    return stree_jax.load(
        write_llama(
            tmp_path_factory.mktemp("printed") / "model",
            padded_size(tokenizer),
            tokenizer=tokenizer,
            chain=chain,
            config={"eos_token_id": None},
        )
    )


@pytest.fixture(scope="module")
def drafted(model):
    options = dict(tree="chain:3", max_new_tokens=20, keep_past=True)
    return stree_jax.generate(model, [LOOP * 2, LOOP[:3]], **options)


class Reader(HTMLParser):
    """Collects the text and the tags of a fragment, and the tooltip of each span."""

    def __init__(self, source):
        super().__init__()
        self.text, self.tags, self.titles, self.open = "", set(), [], []
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)
        self.titles += [value for name, value in attrs if name == "title"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_a_result_prints_on_one_screen(drafted):
    lines = repr(drafted).splitlines()
    assert len(lines) == 3 and max(map(len, lines)) < 160
    assert lines[0].startswith("Generation: 2 texts, 40 tokens, acceptance length ")
    calls = drafted.target_calls[1]
    assert lines[2].startswith(f"  [1] 20 tokens, {calls} target passes, length: ")
    assert lines[2].endswith(repr(drafted.texts[1]))


def test_long_texts_and_large_batches_are_shortened(drafted):
    text = "a" * 5000 + "\nthe end"
    many = dataclasses.replace(
        drafted,
        tokens=drafted.tokens * 20,
        lengths=np.tile(drafted.lengths, 20),
        texts=[text] * 40,
        finish_reasons=["stop"] * 40,
        stop_reasons=[2] * 40,
        target_calls=np.tile(drafted.target_calls, 20),
    )
    lines = repr(many).splitlines()
    assert len(lines) == 10 and lines[-1] == "  ... 32 more texts"
    assert "stop at token 2: 'aaa" in lines[1] and lines[1].endswith("\\nthe end'")


def test_a_result_without_a_tokenizer_prints_ids():
    found = stree_jax.generate(tiny(1, layers=("mamba",)), [[8]], max_new_tokens=20)
    line = repr(found).splitlines()[1]
    assert line.split(": ")[1].split()[:2] == [str(t) for t in found.tokens[0][:2]]
    assert line.endswith("...")
    assert Reader(found._repr_html_()).text.endswith(str(found.tokens[0][-1]))


def test_html_shows_every_text_by_origin(drafted):
    page = Reader(drafted._repr_html_())
    assert page.tags <= {"div", "b", "pre", "span", "i"}
    for text in drafted.texts:
        assert text in page.text
    assert "acceptance length" in page.text
    assert "proposed by: target prompt lookup" in page.text
    assert set(page.titles) == {"prompt lookup"}


def test_html_cannot_be_injected(model, drafted):
    bad = "</pre><script>alert(1)</script>"
    row = notebook.HtmlRow(bad, [(bad, 0), (bad, 1)])
    page = Reader(notebook.html_of(bad, [row], {0: "target", 1: bad}, bad))
    assert "script" not in page.tags and page.text.count(bad) == 6
    evil = dataclasses.replace(drafted, stop_reasons=[bad, bad], texts=[bad, bad])
    assert "script" not in Reader(evil._repr_html_()).tags


def test_colours_leave_the_text_in_the_colour_of_the_page(drafted):
    """Text keeps the page's colour, so it is readable on light and dark pages."""
    page = drafted._repr_html_()
    assert "rgba(" in page
    assert not re.search(r"[^-]color:", page)


def test_long_texts_are_cut_in_html(drafted, monkeypatch):
    monkeypatch.setattr(result, "MOST_TOKENS_COLOURED", 5)
    page = Reader(drafted._repr_html_())
    assert page.text.count("... 15 more tokens") == 2


@pytest.mark.parametrize(
    ("stages", "name"),
    [
        (["target", "heads"], "draft heads"),
        (["target", "drafter", "n-gram"], "draft model"),
        (["target", "mtp"], "MTP layers"),
        (["target", "n-gram"], "n-grams"),
        (["target"], "drafter"),
    ],
)
def test_the_drafter_is_named_after_its_stage(stages, name):
    traffic = [Traffic(stage, 1, 0, 0, 0) for stage in stages]
    assert result.drafter_name(traffic) == name


def test_copies_and_pickles_print_without_the_tokenizer(model, drafted):
    size = len(model.tokenizer.to_str())
    for same in (copy.deepcopy(drafted), pickle.loads(pickle.dumps(drafted))):
        assert same.decoders is None and repr(same) == repr(drafted)
        page = Reader(same._repr_html_())
        assert drafted.texts[0] in page.text and "proposed by" not in page.text
    light = dataclasses.replace(drafted, past=None)
    assert len(pickle.dumps(light)) < size


def test_items_of_a_stream_print(model):
    parts = list(stree_jax.stream(model, LOOP, max_new_tokens=6, steps=1, drafter=None))
    assert len(parts) == 6
    assert "running" in repr(parts[0]) and "length" in repr(parts[-1])
    assert "1 token, 1 target pass, running" in repr(parts[0])
    assert Reader(parts[0]._repr_html_()).text


def test_pasts_models_and_trees_print_in_a_line(model, drafted):
    lines = [repr(drafted.past), repr(model), repr(make_tree([-1, 0, 0, 1]))]
    lines += [repr(chain(2)), repr(drafted.past.target)]
    assert all("\n" not in line and len(line) < 200 for line in lines), lines
    lengths = [len(row) for row in drafted.past.tokens]
    assert repr(drafted.past).startswith(f"Past(2 rows of {lengths[0]}, {lengths[1]}")
    assert "parents=[-1, 0, 0, 1]" in lines[2]
    taken = stree_jax.generate(
        model, ["", ""], max_new_tokens=1, past=drafted.past, keep_past=True
    )
    stree_jax.generate(
        model, ["", ""], max_new_tokens=1, past=taken.past, take_past=True
    )
    assert "rows of" in repr(taken.past)  # whose arrays are gone


def test_decodings_print_in_a_line():
    prompts, lengths = np.array([[8, 9]]), np.array([2])
    seen = []

    @jax.jit
    def inside(prompts, lengths):
        done = stree_jax.generate_tokens(
            tiny(1, layers=("mamba",)),
            prompts,
            lengths,
            drafter=None,
            max_new_tokens=2,
        )
        seen.append(repr(done) + repr(chain(1)))
        return done

    seen.append(repr(inside(prompts, lengths)))
    assert len(seen) == 2 and all("\n" not in line for line in seen)
