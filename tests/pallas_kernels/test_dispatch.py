"""Test which implementation of an operation runs, and that results are the same."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from stree_jax import pallas_kernels
from stree_jax.pallas_kernels import (
    DeltaInputs,
    DeltaReplayed,
    Replayed,
    ScanInputs,
    attention,
    delta,
    ops,
    rounded_to,
    scan,
)
from stree_jax.pallas_kernels.dispatch import Kernel, dispatch
from tests.support.lowering import lowered
from tests.support.native import built, use

ROOT = Path(__file__).parents[2]
B, T, H, P, N = 1, 5, 2, 16, 16
MASK = jnp.tril(jnp.ones((B, T, T), bool))


def array(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def scan_args():
    dt = jax.nn.softplus(array(1, B, T, H))
    x, Bs, C = array(0, B, T, H, P), array(2, B, T, 1, N), array(3, B, T, 1, N)
    inputs = ScanInputs(x, dt, -dt, Bs, C, array(4, H))
    return inputs, array(5, B, H, P, N), MASK


def replay_args():
    inputs, h0, mask = scan_args()
    path, length = jnp.array([[0, 2, 4]], jnp.int32), jnp.array([2], jnp.int32)
    return h0, Replayed(*inputs[:4], path, length), inputs, mask


def delta_args():
    inputs, h0, mask = scan_args()
    k, q, scale = inputs.B, inputs.C, jnp.full((B, T, 1), 0.2)
    beta = jax.nn.sigmoid(inputs.dt)
    return DeltaInputs(q, scale, k, scale, inputs.x, inputs.a, beta), h0, mask


def delta_replay_args():
    inputs, h0, mask = delta_args()
    _, past, *_ = replay_args()
    recorded = inputs.v, inputs.k, inputs.k_scale, inputs.a, past.path, past.length
    return h0, DeltaReplayed(*recorded), inputs, mask


def attention_args():
    q, kv, cache = array(6, B, T, 4, 16), array(7, B, T, 2, 16), array(8, B, 2, 40, 16)
    return q, kv, kv, cache, cache, jnp.array([33], jnp.int32), MASK, 0.25


OPS = {
    "tree_scan": (ops.tree_scan, scan.tree_scan, scan_args),
    "replay_tree_scan": (ops.replay_tree_scan, scan.replay_tree_scan, replay_args),
    "delta_scan": (ops.delta_scan, delta.delta_scan, delta_args),
    "delta_replay_scan": (
        ops.delta_replay_scan,
        delta.delta_replay_scan,
        delta_replay_args,
    ),
    "tree_attention": (ops.tree_attention, attention.tree_attention, attention_args),
}
all_ops = pytest.mark.parametrize("name", OPS)


def called(op, **options):
    """Returns the operation with its static arguments bound, and the other
    arguments."""
    function, _, make = OPS[op]
    args = make()
    if op == "tree_attention":
        return lambda *a: function(*a, 0.25, **options), args[:-1]
    return lambda *a: function(*a, **options), args


@all_ops
def test_a_cpu_without_kernels_runs_the_definition(name, monkeypatch):
    use(monkeypatch, "off")
    function, args = called(name)
    _, definition, make = OPS[name]
    ours = jax.jit(function)(*args)
    on_cpu = attention.in_blocks if name == "tree_attention" else definition
    theirs = jax.jit(on_cpu, static_argnums=7 if "att" in name else ())(*make())
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert "custom_call" not in lowered(function, args, "cpu")


@all_ops
def test_a_gpu_program_has_the_kernel(name):
    text = lowered(*called(name), "cuda")
    plain = lowered(*called(name, implementation="xla"), "cuda")
    assert "__gpu$xla.gpu.triton" in text
    assert "__gpu$xla.gpu.triton" not in plain


@built
def test_a_cpu_has_its_kernel():
    function, args = called("replay_tree_scan")
    assert "stree_scan" in lowered(function, args, "cpu")
    plain, args = called("replay_tree_scan", implementation="xla")
    assert "stree_scan" not in lowered(plain, args, "cpu")


@all_ops
def test_exports_leave_kernels_out_on_request(name):
    """For all platforms in one program, which can then be serialized."""
    function, args = called(name)
    with pallas_kernels.without_kernels():
        make = export.export(jax.jit(function), platforms=("cpu", "cuda", "tpu"))
        program = make(*args)
    assert "custom_call" not in program.mlir_module()
    with pallas_kernels.without_kernels():  # other programs keep their kernels
        assert "__gpu$xla.gpu.triton" in lowered(function, args, "cuda")


def test_plain_decoding_uses_xla():
    h0, past, inputs, _ = replay_args()
    *tokens, D = inputs
    one = ScanInputs(*(z[:, :1] for z in tokens), D)
    args = h0, past._replace(path=past.path[:, :1]), one, jnp.ones((B, 1, 1), bool)
    for named, kernel in ((None, False), ("triton", True)):
        run = partial(ops.replay_tree_scan, implementation=named)
        assert ("__gpu$xla.gpu.triton" in lowered(run, args, "cuda")) == kernel
    longer = h0, past, one, jnp.ones((B, 1, 1), bool)
    assert "__gpu$xla.gpu.triton" in lowered(ops.replay_tree_scan, longer, "cuda")


@all_ops
def test_an_unknown_implementation_is_refused(name):
    function, args = called(name, implementation="cutlass")
    message = f"{name}: unknown implementation 'cutlass'; known"
    with pytest.raises(ValueError, match=message):
        function(*args)


def test_a_named_kernel_runs_or_raises():
    inputs, h0, mask = scan_args()
    odd = (inputs._replace(x=inputs.x[..., :5]), h0[:, :, :5], mask)
    with pytest.raises(ValueError, match="tree_scan: triton: the head size 5"):
        ops.tree_scan(*odd, implementation="triton")
    ours = ops.tree_scan(*odd)  # and by default plain JAX does it
    np.testing.assert_array_equal(ours, scan.tree_scan(*odd))


def test_heads_that_do_not_divide_raise():
    """Before anything runs, also for a named kernel."""
    inputs, h0, mask = scan_args()
    three = [jnp.repeat(z[:, :, :1], 3, axis=2) for z in (inputs.B, inputs.C)]
    odd = inputs._replace(B=three[0], C=three[1])
    assert inputs.x.shape[2] % 3
    with pytest.raises(ValueError, match="tree_scan: . heads cannot share 3 evenly"):
        ops.tree_scan(odd, h0, mask)
    function, args = called("tree_attention")
    q, k, v, *rest = args
    with pytest.raises(ValueError, match="tree_attention: 1 heads cannot share"):
        function(q[:, :, :1], jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2), *rest)


def test_decays_by_column_have_a_kernel():
    inputs, h0, mask = delta_args()
    columns = inputs._replace(a=jnp.broadcast_to(inputs.a[..., None], (B, T, H, N)))
    text = lowered(ops.delta_scan, (columns, h0, mask), "cuda")
    assert "__gpu$xla.gpu.triton" in text


def test_the_first_supported_kernel_is_used():
    kernels = {
        "never": Kernel(lambda x: x + 1, "it never can"),
        "exact": Kernel(lambda x: x + 2, None),
        "other": Kernel(lambda x: x + 3, None),
    }
    run = jax.jit(lambda x: dispatch("op", None, lambda x: x, kernels, x))
    assert run(1.0) == 1.0  # on a CPU
    for name, plus in (("exact", 2), ("other", 3)):
        assert dispatch("op", name, lambda x: x, kernels, 1) == 1 + plus
    with pytest.raises(ValueError, match="op: never: it never can"):
        dispatch("op", "never", lambda x: x, kernels, 1)
    text = lowered(
        lambda x: dispatch("op", None, lambda x: x, kernels, x), [1.0], "cuda"
    )
    assert "2.0" in text and "3.0" not in text


@all_ops
def test_gradients_come_from_the_definition(name):
    function, args = called(name)
    _, definition, make = OPS[name]

    def total(function):
        def run(first, *rest):
            return sum(
                jnp.sin(y).sum() for y in jax.tree.leaves(function(first, *rest))
            )

        return jax.jit(jax.grad(run))

    plain = (lambda *a: definition(*a, 0.25)) if "att" in name else definition
    close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(close, total(function)(*args), total(plain)(*args))


@all_ops
def test_vmap_and_loops(name):
    function, args = called(name)
    many = jax.tree.map(lambda z: jnp.stack([z, z]), args)
    one, both = jax.jit(function)(*args), jax.jit(jax.vmap(function))(*many)

    def body(carry):
        return carry[0] + 1, function(*args)

    looped = jax.jit(lambda y: jax.lax.while_loop(lambda c: c[0] < 2, body, (0, y))[1])
    for got in (jax.tree.map(lambda z: z[1], both), looped(one)):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
            got,
            one,
        )


def test_export_for_cuda():
    from jax import export

    function, args = called("tree_attention")
    allowed = [export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    shapes = jax.tree.map(lambda z: jax.ShapeDtypeStruct(z.shape, z.dtype), args)
    if tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 11):
        pytest.skip("from jax 0.11 on the exporter wants a device of that kind")
    exported = export.export(
        jax.jit(function), platforms=["cuda"], disabled_checks=allowed
    )(*shapes)
    assert exported.platforms == ("cuda",)
    assert "__gpu$xla.gpu.triton" in exported.mlir_module()


def test_public_names():
    for name in (*OPS, "chunk_scan", "replay", "tree_conv", "commit_window"):
        assert callable(getattr(pallas_kernels, name))


def test_numbers_are_rounded_in_every_program():
    """To the nearest, ties to even, with an operation that XLA never removes."""
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    x = np.append(bits, np.uint32([0x3F808000, 0x3F818000, 0x7F7FFFFF])).view(
        np.float32
    )
    x = x[~np.isnan(x)]
    found = jax.jit(partial(rounded_to, dtype=jnp.bfloat16))(x)
    assert found.dtype == jnp.bfloat16
    with np.errstate(over="ignore"):
        wanted = x.astype(jnp.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(np.asarray(found).view(np.uint16), wanted)
    for dtype, times in ((jnp.bfloat16, 1), (jnp.float32, 0)):
        text = lowered(partial(rounded_to, dtype=dtype), (x,), "cuda")
        assert text.count("reduce_precision") == times


def test_programs_for_cpus_do_not_import_triton():
    """Importing it takes 0.1 s."""
    code = """
import sys
import jax
from stree_jax import pallas_kernels
from tests.pallas_kernels.test_dispatch import delta_replay_args, replay_args
jax.jit(pallas_kernels.replay_tree_scan).lower(*replay_args())
jax.jit(pallas_kernels.delta_replay_scan).lower(*delta_replay_args())
assert "stree_jax.pallas_kernels.triton_limits" in sys.modules
names = ("triton_blocks", "pallas.triton", "panels.triton")
assert not [name for name in sys.modules if name.endswith(names)]
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT
    )
