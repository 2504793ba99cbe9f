"""Test GGUF files written from parameters, the llama.cpp process, and `bench peers`.

llama.cpp itself is not run here. `bench peers` compares its logits before timing it.
"""

import math
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from bench import gguf_writer, peers
from bench.arms import PLAIN, parse_arm
from bench.gguf_writer import gguf_tensors, write_gguf
from bench.llama_process import llama_process, llama_version
from bench.method import Run
from bench.others import TRANSFORMERS
from bench.registry import parse_bench
from stree_jax.generation.scoring import score
from stree_jax.models import (
    AttentionConfig,
    DeltaConfig,
    MLPConfig,
    Model,
    MoEConfig,
    Rope,
)
from stree_jax.models.stack.config import named
from tests.bench.pairs import HYBRID, MAMBA2, cells, drawn, params_of

LLAMA = replace(
    HYBRID,
    layers=("attention", "mlp"),
    mixers={name: HYBRID.mixers[name] for name in ("attention", "mlp")},
    logits_divisor=1.0,
)
QWEN = replace(
    LLAMA,
    layers=("delta", "mlp", "attention", "mlp"),
    norm="rms_float32",
    mixers=named(
        delta=DeltaConfig(2, 6, 16, 16, norm_eps=1e-6),
        attention=AttentionConfig(
            *(4, 2, 16),
            rope=Rope(1e4, 8),
            qk_norm_eps=1e-6,
            qk_norm_float32=True,
            gated=True,
        ),
        mlp=MLPConfig(64),
    ),
)
EXPERTS = MoEConfig(6, 2, 32, shared=MLPConfig(64), shared_gate=True)
QWEN_MOE = replace(
    QWEN,
    layers=("delta", "moe", "attention", "moe"),
    mixers=named(
        delta=QWEN.mixers["delta"], attention=QWEN.mixers["attention"], moe=EXPERTS
    ),
)


def to_bfloat16(x):
    return np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32))


# --- the file -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", gguf_writer.KINDS)
@pytest.mark.parametrize(
    "config",
    [HYBRID, MAMBA2, LLAMA, QWEN, QWEN_MOE],
    ids=["hybrid", "mamba2", "llama", "qwen35", "qwen35moe"],
)
def test_a_file_reads_back(config, dtype, tmp_path):
    gguf = pytest.importorskip("gguf")
    params = params_of(config)
    file = tmp_path / "m.gguf"
    read_bytes = write_gguf(config, params, dtype, file)
    found = {t.name: t for t in gguf.GGUFReader(file).tensors}
    ours = {name: tensor for _, name, tensor in gguf_tensors(config, params)}
    assert found.keys() == ours.keys()
    kinds = set()
    for name, tensor in found.items():
        kind = tensor.tensor_type
        back = gguf.quants.dequantize(tensor.data, kind).reshape(ours[name].shape)
        if kind.name == "F32":
            np.testing.assert_array_equal(back, ours[name])
        elif kind.name == "BF16":
            np.testing.assert_array_equal(back, to_bfloat16(ours[name]))
        # Rounding to half a step of 1/127 of the block's maximum; scales are float16
        else:
            blocks, apart = (z.reshape(-1, 32) for z in (ours[name], back - ours[name]))
            step = np.abs(blocks).max(1, keepdims=True) / 127
            assert (np.abs(apart) <= (0.5 + 127 * 2**-11) * step).all()
        if name.startswith(
            ("token_embd", "blk.0.ssm_in", "blk.1.attn_q.", "blk.0.attn_qkv")
        ):
            kinds.add(kind.name)
    if dtype == "float32":  # it also loads as the same model, except for padding
        ours_again = stree_jax.load(file).config
        assert (
            replace(
                ours_again.with_mixers(attention=config.mixers.get("attention")),
                num_tokens=47,
            )
            == config
        )
    assert kinds == {gguf_writer.KINDS[dtype]}
    table = 0 if config.tie_embeddings else found["token_embd.weight"].n_bytes
    assert read_bytes == sum(t.n_bytes for t in found.values()) - table


def test_fields_of_a_hybrid(tmp_path):
    gguf = pytest.importorskip("gguf")
    write_gguf(HYBRID, params_of(HYBRID), "float32", tmp_path / "m.gguf")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields

    def value(name):
        return fields[name].contents()

    assert value("general.architecture") == "granitehybrid"
    assert value("granitehybrid.block_count") == 2
    assert value("granitehybrid.attention.head_count_kv") == [0, 2]
    assert value("granitehybrid.ssm.inner_size") == 64
    assert value("granitehybrid.ssm.group_count") == 2
    assert value("granitehybrid.attention.scale") == pytest.approx(8**-0.5)
    assert value("granitehybrid.logit_scale") == 3.0
    assert value("granitehybrid.rope.scaling.finetuned") is True
    assert value("granitehybrid.vocab_size") == 50


def test_tensors_are_in_the_layout_of_llama_cpp():
    params = params_of(HYBRID)
    tensors = {name: tensor for _, name, tensor in gguf_tensors(HYBRID, params)}
    sizes = sum(tensor.size for tensor in tensors.values())
    assert sizes == sum(leaf.size for leaf in jax.tree.leaves(params))
    attention, mixer = params["layers_2"]["attention"], params["layers_0"]["mamba"]
    q, k, v = np.split(np.asarray(attention["qkv"]), [32, 48])
    for name, rows, heads in (("attn_q", q, 4), ("attn_k", k, 2)):
        for head in range(heads):
            # Channels rotated together: halves here, neighbours in llama.cpp
            for i in range(4):
                pair = tensors[f"blk.1.{name}.weight"][8 * head + 2 * i :][:2]
                both = rows[8 * head + i], rows[8 * head + i + 4]
                np.testing.assert_array_equal(pair, np.stack(both))
    np.testing.assert_array_equal(tensors["blk.1.attn_v.weight"], v)
    decay = [[-math.exp(a)] for a in mixer["A_log"]]
    np.testing.assert_allclose(tensors["blk.0.ssm_a"], decay, rtol=1e-6)
    up = np.asarray(params["layers_3"]["mlp"]["gate_up"])[64:]
    np.testing.assert_array_equal(tensors["blk.1.ffn_up.weight"], up)
    norm = np.asarray(params["layers_3"]["norm"]["scale"])
    np.testing.assert_array_equal(tensors["blk.1.ffn_norm.weight"], norm)
    assert tensors["blk.0.ssm_norm.weight"].shape == (2, 32)


@pytest.mark.parametrize(
    "config",
    [
        replace(HYBRID, layers=("attention", "mlp")),
        HYBRID.with_mixers(mamba=replace(HYBRID.mixers["mamba"], dt_limit=(0.1, 1.0))),
        HYBRID.with_mixers(mamba=replace(HYBRID.mixers["mamba"], norm_eps=1e-5)),
        HYBRID.with_mixers(
            attention=replace(HYBRID.mixers["attention"], rope=Rope(1e4, 4))
        ),
        HYBRID.with_mixers(mlp=MLPConfig(64, bias=True)),
        replace(MAMBA2, logits_divisor=2.0),
        replace(MAMBA2, norm="layer"),
        replace(QWEN, layers=("delta", "mlp")),
        replace(QWEN, mtp=("attention", "mlp")),
        QWEN.with_mixers(delta=replace(QWEN.mixers["delta"], value_dim=8)),
        QWEN.with_mixers(attention=replace(QWEN.mixers["attention"], gated=False)),
        QWEN_MOE.with_mixers(moe=replace(EXPERTS, shared_gate=False)),
    ],
)
def test_models_unsupported_by_llama_cpp_are_refused(config):
    with pytest.raises(ValueError, match="llama.cpp: want a Mamba2 model"):
        gguf_writer.arch_of(config)


def test_rows_of_incomplete_blocks_are_refused(tmp_path):
    pytest.importorskip("gguf")
    mamba = replace(MAMBA2.mixers["mamba"], num_heads=6, head_dim=8)
    config = replace(MAMBA2.with_mixers(mamba=mamba), d_model=24)
    with pytest.raises(ValueError, match="rows of 24 are no whole blocks of 32"):
        write_gguf(config, params_of(config), "int8", tmp_path / "m.gguf")


# --- the process ----------------------------------------------------------------------


def test_a_python_without_llama_cpp_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--llama-python: .*No such file"):
        llama_version(tmp_path / "python")
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(ValueError, match="No module named '.*pip install llama-cpp"):
        llama_version(bare)


# --- the report -----------------------------------------------------------------------


def cell(seconds, tokens, calls, equal=None):
    times = {"seconds": seconds, "first_call_s": 1.0}
    return times | {"tokens": tokens, "calls": calls, "equal": equal}


def test_the_arithmetic_of_the_report():
    arms = {
        PLAIN: cell([2.0, 1.0, 4.0], 100, 100, True),
        "E": cell([0.5], 100, 40, False),
        peers.LLAMA: cell([1.0], 100, 100),
    }
    read = {"ours": 10**9, "llama.cpp": 2 * 10**9}
    units = {
        "logits": {"m/float32": {"logits_apart": 1e-5, "read_bytes": read}},
        "m/float32/set/0": {"bytes_per_s": 10**11, "arms": arms},
    }
    rows = {row["arm"]: row for row in peers.peer_rows(units)}
    plain, tree, llama = (rows[name] for name in arms)
    assert [row["tokens_per_s"] for row in rows.values()] == [50, 200, 100]
    assert [row["ms_per_token"] for row in rows.values()] == [20, 5, 10]
    assert [row["floor_ms"] for row in rows.values()] == pytest.approx([10, 10, 20])
    over = [row["over_floor"] for row in rows.values()]
    assert over == pytest.approx([2, 0.5, 0.5])
    medians = [row["over_llama"]["median"] for row in rows.values()]
    assert medians == [0.5, 2, 1]
    assert tree["over_transformers"] is None
    arms[TRANSFORMERS] = arms.pop(peers.LLAMA)
    alone = {row["arm"]: row for row in peers.peer_rows(units)}
    assert alone["E"]["over_transformers"]["median"] == 2
    assert alone["E"]["over_llama"] is None
    assert (plain["equal"], tree["equal"], llama["equal"]) == (1, 0, None)
    assert tree["tau"] == 2.5


@pytest.fixture
def subject():
    """Returns a model and a stand-in for llama.cpp whose logits are `off` away."""
    model = Model(params=params_of(MAMBA2), config=MAMBA2)
    prompts = {"random": [(1, 2, 3)]}
    return peers.Subject(model, model, (parse_arm(PLAIN),), prompts)


def stand_in(model, off):
    """A `llama_process` that returns this library's logits, with one of them
    changed."""

    @contextmanager
    def process(python):
        def ask(order, **what):
            if order == "logits":
                logits = np.array(score(model, [what["ids"]]))[0, what["read"] - 1 :]
                logits[-1, 5] += off * np.abs(logits).max()
                real = np.ascontiguousarray(logits[:, : model.config.num_tokens])
                Path(what["path"]).write_bytes(real.tobytes())
            timed = order in ("decode", "time_pass")
            return {"seconds": 0.001 * what["count"]} if timed else {}

        yield ask

    return process


def measured(monkeypatch, subject, off):
    monkeypatch.setattr(peers, "llama_process", stand_in(subject.target, off))
    known = {"version": "0", "built_with": "nothing"}
    monkeypatch.setattr(peers, "llama_version", lambda python: known)
    monkeypatch.setattr(peers, "write_gguf", lambda *args: 10**6)
    monkeypatch.setattr(peers, "transformers_version", lambda: None)
    monkeypatch.setattr(peers, "threads_of_xla", lambda: 2)
    words = ["--dtypes", "float32", "--llama-python", "python", "--passes", "1", "3"]
    args = parse_bench(["peers", *words, "--max-new-tokens", "4"])
    return peers.measure_peers({"tiny": subject}, args, Run(1))


def test_a_peer_with_other_logits_is_not_timed(monkeypatch, subject):
    with pytest.raises(RuntimeError, match="in float32 are 0.00.* more than 0.001"):
        measured(monkeypatch, subject, 0.002)


def test_a_report_with_llama_cpp(monkeypatch, subject):
    report = measured(monkeypatch, subject, 0.0005)
    assert report["complete"]
    apart = report["units"]["logits"]["tiny/float32"]["logits_apart"]
    assert apart == pytest.approx(0.0005, rel=0.05)
    rows = {row["arm"]: row for row in report["results"]}
    assert set(rows) == {PLAIN, peers.LLAMA} and rows[PLAIN]["equal"] == 1
    assert rows[peers.LLAMA]["tokens_per_s"] == pytest.approx(1000)
    single = {(r["program"], r["tokens"]): r for r in report["single_passes"]}
    assert list(single) == [(p, n) for p in ("ours", "llama.cpp") for n in (1, 3)]
    assert single["llama.cpp", 3]["ms"] == pytest.approx(3)
    assert single["llama.cpp", 3]["of_one"] == pytest.approx(3)
    text = peers.table(report)
    rows = cells(text)
    assert [row[1] for row in rows[:3]] == ["arm", PLAIN, peers.LLAMA]
    assert [row[:2] for row in rows[-2:]] == [["llama.cpp", "1"], ["llama.cpp", "3"]]
    assert "2 threads each" in text
    assert len(drawn(report).axes) == 1


def test_a_signal_that_ends_the_process_is_named(tmp_path):
    """For example an illegal instruction in a virtual machine, after which the last
    lines of output explain nothing."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho all is well >&2\nkill -SEGV $$\n")
    python.chmod(0o755)
    with llama_process(python) as ask:
        with pytest.raises(RuntimeError, match="load: died of SIGSEGV.*all is well"):
            ask("load")
