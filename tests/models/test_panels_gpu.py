"""Products with panels on GPUs, computed on a CPU: equal to the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models.weights.panels import KINDS, gpu, triton
from stree_jax.models.weights.panels.product import panel_product
from tests.support.panel_files import random_blocks


def case(scheme, t, m=16, k=256):
    panels = KINDS[scheme].pack({"blocks": random_blocks(scheme, m, k)})
    x = np.random.default_rng(t).standard_normal((t, k)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(panels), KINDS[scheme]


def assert_near(y, wanted):
    assert y.shape == wanted.shape
    assert jnp.abs(y - wanted).max() < 1e-6 * jnp.abs(wanted).max()


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("scheme", ["q4_k", "q6_k"])
def test_forms_in_plain_jax(scheme, planes):
    args = *case(scheme, 3, m=20, k=512), planes
    wanted = panel_product(*args)
    assert_near(gpu.batched_product(*args), wanted)
    assert_near(gpu.decoded_product(*args, precision="highest"), wanted)


@pytest.mark.parametrize(
    ("scheme", "planes"), [("q4_k", 2), ("q6_k", 1), ("q5_1", 1), ("mxfp4", 1)]
)
def test_the_kernel(scheme, planes):
    x, panels, kind = case(scheme, 3, m=20, k=512)
    blocks = triton.Blocks(rows=16, splits=2)
    y = triton.panel_product(x, panels, kind, planes, blocks=blocks, interpret=True)
    assert_near(y, panel_product(x, panels, kind, planes))
    one = triton.panel_product(
        x[:1], panels, kind, planes, blocks=blocks, interpret=True
    )
    np.testing.assert_array_equal(one[0], y[0])


def test_arguments_that_the_kernel_does_not_support():
    x, panels, kind = case("mxfp4", 2, k=384)
    assert "384" not in str(triton.unsupported(x, panels, kind, 1))
    assert "groups of 192" in str(triton.unsupported(x, panels, kind, 2))
    with pytest.raises(NotImplementedError, match="65 rows"):
        triton.panel_product(jnp.zeros((65, 384)), panels, kind, 1)


@pytest.mark.parametrize("planes", [1, 2])
def test_block_sizes_cover_all_columns(planes):
    for m, k in ((16, 576), (2560, 10240), (10240, 2560), (248320, 5120)):
        cut = triton.default_blocks(m, k, KINDS["q4_0"], planes)
        chunks = k // (192 if k == 576 and planes == 2 else 256 if planes == 2 else 64)
        share = -(-chunks // cut.splits)
        assert share * (cut.splits - 1) < chunks <= share * cut.splits


def emulated(assembly: str, *args: jax.Array) -> jax.Array:
    """Runs PTX instructions on words of four bytes."""
    words = [np.asarray(a).view(np.uint32).astype(np.uint64) for a in args]
    values = {f"${i + 1}": word for i, word in enumerate(words)}
    operations = {
        "and.b32": np.bitwise_and,
        "or.b32": np.bitwise_or,
        "xor.b32": np.bitwise_xor,
        "shl.b32": np.left_shift,
        "shr.b32": np.right_shift,
        "sub.u32": np.subtract,
    }
    for line in filter(None, map(str.strip, assembly.split(";"))):
        name, rest = line.split(" ", 1)
        to, *names = (word.strip() for word in rest.split(","))
        left, right = (values[n] if n in values else np.uint64(int(n)) for n in names)
        values[to] = operations[name](left, right) & np.uint64(0xFFFFFFFF)
    return jnp.asarray(values["$0"].astype(np.uint32).view(np.int8))


def test_operations_on_four_bytes_at_a_time(monkeypatch):
    monkeypatch.setattr(triton, "_in_words", emulated)
    one, four = triton._Bytes, triton._BytesInWords
    random = np.random.default_rng(0)
    x, others = (random.integers(0, 256, (4, 32), np.uint8) for _ in range(2))
    for shift in (-4, -2, 0, 1, 4):
        kept = (0xFF << shift if shift > 0 else 0xFF >> -shift) & 0xFF
        mask = random.integers(0, 256, x.shape, np.uint8) & np.uint8(kept)
        args = jnp.asarray(x), shift, jnp.asarray(mask), jnp.asarray(others)
        np.testing.assert_array_equal(four.take(*args), one.take(*args))
    small = jnp.asarray(x & 127)
    for zero in (0, 8, 32):
        np.testing.assert_array_equal(four.less(small, zero), one.less(small, zero))
