"""Compiled programs that are kept on disk: read again without tracing, and never used
where they do not fit."""

import dataclasses
import enum
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from stree_jax.common import programs
from stree_jax.common.programs import Jitted, NotKeptError, add_description, keep_in
from stree_jax.common.reading_ahead import ReadingAhead

traced: list[str] = []


@struct.dataclass
class Box:
    value: jax.Array
    factor: float = struct.field(pytree_node=False, default=2.0)


def scaled(box: Box, shift: jax.Array, *, power: int = 1) -> Box:
    traced.append("scaled")
    return box.replace(value=box.value**power * box.factor + shift)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@pytest.fixture(autouse=True)
def of_this_module(monkeypatch):
    """Lets programs with code of this module be kept. No command has begun: one that
    another test ran in this process would note its programs in the folder."""
    monkeypatch.setattr(programs, "PACKAGES", {*programs.PACKAGES, "tests"})
    monkeypatch.setattr(programs, "_ahead", ReadingAhead())


@pytest.fixture
def kept(tmp_path):
    """Keeps programs in a folder; no function has been traced."""
    folder = tmp_path / "programs"
    keep_in(folder)
    traced.clear()
    yield folder
    keep_in(None)


def called(box: Box, shift: float = 1.0, **options: Any) -> np.ndarray:
    """Calls `scaled` as a new process would."""
    jax.clear_caches()
    jitted = Jitted(scaled, static=("power",), donated=("shift",))
    return np.asarray(jitted(box, jnp.full((3,), shift), **options).value)


def box(*values: float, **fields: Any) -> Box:
    return Box(jnp.asarray(values, jnp.float32), **fields)


def test_a_kept_program_is_read_without_tracing(kept):
    first = called(box(1, 2, 3), power=2)
    assert traced == ["scaled"] and first.tolist() == [3, 9, 19]
    assert called(box(2, 3, 4), 0.0, power=2).tolist() == [8, 18, 32]
    assert traced == ["scaled"]
    (file,) = kept.iterdir()
    assert file.name.startswith("scaled-") and kept.stat().st_mode & 0o077 == 0


def test_without_a_folder_nothing_is_kept(kept):
    keep_in(None)
    called(box(1, 2, 3))
    called(box(1, 2, 3))
    assert traced == ["scaled"] * 2 and not kept.exists()


def test_each_kind_of_difference_is_another_program(kept, monkeypatch):
    def of_new_source():
        monkeypatch.setattr(programs, "__version__", "another")
        programs._surroundings.cache_clear()
        return called(box(1, 2, 3))

    def of_another_environment():
        monkeypatch.setenv("XLA_ANYTHING", "1")
        programs._surroundings.cache_clear()
        return called(box(1, 2, 3))

    def of_another_setting():
        with jax.numpy_dtype_promotion("standard"):
            return called(box(1, 2, 3))

    expected = called(box(1, 2, 3))
    for number, call in enumerate(
        [
            lambda: called(box(1, 2, 3), power=2),
            lambda: called(box(1, 2, 3, factor=3.0)),
            lambda: called(box(5)),
            of_another_setting,
            of_another_environment,
            of_new_source,
        ]
    ):
        found = call()
        assert len(traced) == number + 2, number
        assert (found == expected).all() == (number > 2), number
    programs._surroundings.cache_clear()


def _cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def _flipped(file):
    body = bytearray(file.read_bytes())
    body[len(body) // 2] ^= 1
    file.write_bytes(body)


def _other_format(file):
    file.write_bytes(b"another program" + file.read_bytes())


def _open_to_others(file):
    file.chmod(0o666)


def _folder_open_to_others(file):
    file.parent.chmod(0o777)


def _link(file):
    moved = file.with_name("moved")
    file.rename(moved)
    file.symlink_to(moved)


@pytest.mark.parametrize(
    "spoil",
    [_cut, _flipped, _other_format, _open_to_others, _folder_open_to_others, _link],
)
def test_a_file_that_is_damaged_or_open_to_others_is_not_used(kept, spoil):
    expected = called(box(1, 2, 3))
    (file,) = kept.iterdir()
    spoil(file)
    assert (called(box(1, 2, 3)) == expected).all()
    assert traced == ["scaled"] * 2
    if spoil is not _folder_open_to_others:  # the file was written again
        called(box(1, 2, 3))
        assert traced == ["scaled"] * 2


def test_a_folder_that_cannot_be_written_changes_nothing(kept, tmp_path):
    (tmp_path / "file").write_text("")
    keep_in(tmp_path / "file" / "below")
    assert called(box(1, 2, 3)).tolist() == [3, 5, 7]


def test_a_program_is_read_where_nothing_can_be_written(kept, monkeypatch):
    def refuse(*_):
        raise OSError("read-only file system")

    called(box(1, 2, 3))
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(programs, "write_whole", refuse)
    assert called(box(1, 2, 3)).tolist() == [3, 5, 7] and traced == ["scaled"]


def test_programs_in_the_cache_of_jax_are_kept_whole(kept, tmp_path):
    """XLA cannot write a program that was read from that cache."""
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_compilation_cache_dir
    names = "min_compile_time_secs", "min_entry_size_bytes"
    limits = [f"jax_persistent_cache_{name}" for name in names]
    old = [getattr(jax.config, name) for name in limits]
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "xla"))
        for name, value in zip(limits, (0, -1), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        keep_in(None)
        expected = called(box(1, 2, 3))
        assert list((tmp_path / "xla").iterdir())
        keep_in(kept)
        for _ in range(2):
            assert (called(box(1, 2, 3)) == expected).all()
        assert traced == ["scaled"] * 2
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        for name, value in zip(limits, old, strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_the_least_recently_used_programs_are_removed(kept, monkeypatch):
    called(box(1, 2, 3))
    (first,) = kept.iterdir()
    called(box(1, 2, 3), power=2)
    (second,) = set(kept.iterdir()) - {first}
    os.utime(first, (1, 1))
    monkeypatch.setattr(programs, "MOST_BYTES", int(2.5 * first.stat().st_size))
    called(box(1, 2, 3), power=3)
    assert not first.exists() and second.exists() and len(list(kept.iterdir())) == 2


def test_shapes_are_known_without_tracing(kept):
    args = box(1, 2, 3), jax.ShapeDtypeStruct((3,), jnp.float32)
    jitted = Jitted(scaled, static=("power",))
    traced_shapes = jitted.shapes(*args, power=2)
    jitted.prepare(*args, power=2)
    traced.clear()
    again = Jitted(scaled, static=("power",))
    kept_shapes = again.shapes(*args, power=2)
    assert not traced and kept_shapes.value.shape == traced_shapes.value.shape == (3,)
    assert kept_shapes.value.dtype == traced_shapes.value.dtype == jnp.float32


def text(value: Any) -> str:
    texts: list[str] = []
    add_description(texts, value)
    return "".join(texts)


@dataclasses.dataclass(frozen=True)
class Settings:
    size: int = 1
    name: str = dataclasses.field(default="a", repr=False, compare=False)


def test_different_values_have_different_texts():
    values = [
        *(None, True, 1, 1.0, 0.0, -0.0, "1", "a", b"a", float("nan")),
        *((), [], (1,), [1], (1, 2), ((1,), 2), (1, (2,)), ("1;", "2"), ("1", ";2")),
        *({}, {"a": 1}, {"a": 2}, {"b": 1}, frozenset({1}), frozenset({2})),
        *(Colour.RED, Colour.BLUE, Settings(), Settings(2), Settings(1, "b")),
        *(np.float32(1), np.ones(1), np.ones(2), np.ones(1, np.float32)),
        *(np.dtype("f4"), np.dtype("f8"), int, float, scaled, box),
        *(functools.partial(scaled, 1), functools.partial(scaled, 2)),
    ]
    assert len({text(value) for value in values}) == len(values)


@pytest.mark.parametrize("value", [lambda: 0, object(), iter([])])
def test_a_value_without_a_text_is_refused(value):
    with pytest.raises(NotKeptError):
        text(value)


def test_a_program_with_code_of_others_is_not_kept(kept, monkeypatch):
    monkeypatch.setattr(programs, "PACKAGES", programs.PACKAGES - {"tests"})
    assert called(box(1, 2, 3)).tolist() == [3, 5, 7]
    assert not kept.exists()


def test_a_call_within_another_program_is_traced(kept):
    jitted = Jitted(scaled, static=("power",))
    outer = jax.jit(lambda b: jitted(b, jnp.zeros(3)).value)
    assert outer(box(1, 2, 3)).tolist() == [2, 4, 6]
    assert not kept.exists()
