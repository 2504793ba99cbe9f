"""Prints predicted bytes beside the compiler's, for 49 configurations.

    python -m tests.memory_table [--only WORD]

Takes some minutes, because every line compiles a program. The exit code is 1 if a
prediction is off by more than `LIMIT`.
"""

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from stree_jax.models import (
    AttentionConfig,
    DeltaConfig,
    KDAConfig,
    LightningConfig,
    Mamba1Config,
    MambaConfig,
    MLAConfig,
    MLPConfig,
    Model,
    ModelConfig,
    Rope,
)
from stree_jax.models.drafters.dflash import DFlashConfig, DFlashLayer
from stree_jax.models.drafters.eagle import FIRST, EagleConfig
from stree_jax.models.stack.boundaries import boundary_count
from stree_jax.models.stack.config import blocks, named
from stree_jax.sizing.memory import abstract_model, compiled_bytes, memory_of
from stree_jax.sizing.parts import BufferSizes
from stree_jax.speculation.drafters.eagle import EagleSource
from stree_jax.speculation.drafters.mtp import TrimmedMTPConfig
from stree_jax.speculation.drafters.table import abstract_source
from stree_jax.speculation.source import Source

LIMIT = 0.03
LAYERS = {
    "mamba2": ("mamba",) * 8,
    "hybrid": ("mamba", "mlp", "mamba", "mlp", "attention", "mlp") * 2,
    "attention": ("attention", "mlp") * 4,
    "lightning": ("stream:lightning", "stream:mlp") * 4,
    "kda": ("kda", "mlp", "kda", "mlp", "mla", "mlp") * 2,
    "jamba": ("mamba1", "mlp", "mamba1", "mlp", "attention", "mlp") * 2,
    "delta": ("delta", "mlp", "delta", "mlp", "delta", "mlp", "attention", "mlp") * 2,
}


@dataclass(frozen=True)
class Case:
    """A generation: layers, tree, drafter, rows, and other sizes."""

    kind: str
    tree: str
    drafter: str
    batch: int
    dtype: str
    capacity: int = 1024
    vocab: int = 8192
    width: int = 256

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.tree}, {self.drafter}, {self.batch}, {self.dtype}"


CASES = [
    Case("mamba2", "chain:0", "none", 1, "float32"),
    Case("mamba2", "chain:4", "lookup", 1, "float32"),
    Case("mamba2", "E", "model", 1, "float32"),
    Case("mamba2", "E", "model", 4, "bfloat16"),
    Case("mamba2", "binary:6", "model", 8, "float32"),
    Case("mamba2", "chain:0", "none", 8, "bfloat16"),
    Case("mamba2", "binary:6", "lookup", 1, "bfloat16", vocab=50288),
    Case("hybrid", "chain:0", "none", 1, "float32"),
    Case("hybrid", "chain:4", "lookup", 2, "float32", capacity=4096),
    Case("hybrid", "A", "model", 1, "float32"),
    Case("hybrid", "E", "model", 4, "bfloat16"),
    Case("hybrid", "E", "lookup", 8, "float32", vocab=32000),
    Case("hybrid", "binary:6", "model", 2, "float32"),
    Case("hybrid", "binary:6", "model", 4, "bfloat16", capacity=2048),
    Case("attention", "chain:0", "none", 4, "float32"),
    Case("attention", "chain:0", "none", 1, "bfloat16", capacity=4096),
    Case("attention", "chain:4", "model", 1, "float32"),
    Case("attention", "E", "lookup", 1, "bfloat16"),
    Case("attention", "E", "model", 8, "float32"),
    Case("attention", "binary:6", "model", 2, "bfloat16"),
    Case("delta", "chain:0", "none", 1, "float32"),
    Case("delta", "chain:0", "none", 8, "bfloat16"),
    Case("delta", "chain:4", "mtp", 1, "float32"),
    Case("delta", "E", "mtp", 1, "bfloat16"),
    Case("delta", "E", "mtp", 8, "float32"),
    Case("delta", "E", "lookup", 8, "bfloat16", vocab=32000),
    Case("hybrid", "chain:4", "eagle", 1, "float32", vocab=32000),
    Case("attention", "E", "eagle", 1, "bfloat16"),
    Case("attention", "E", "eagle", 8, "float32"),
    Case("hybrid", "binary:6", "eagle", 8, "bfloat16", vocab=32000),
    Case("attention", "E", "parallel eagle", 1, "float32"),
    Case("attention", "A", "parallel eagle", 8, "bfloat16", vocab=32000),
    Case("delta", "binary:6", "mtp", 1, "bfloat16"),
    Case("delta", "binary:6", "mtp", 8, "float32"),
    Case("hybrid", "chain:4", "block", 1, "float32"),
    Case("hybrid", "E", "block", 1, "bfloat16"),
    Case("hybrid", "E", "block", 8, "float32"),
    Case("hybrid", "binary:4", "block", 4, "bfloat16", capacity=2048),
    Case("hybrid", "E", "trimmed block", 1, "float32", vocab=32000),
    Case("attention", "auto:1,4,8", "block", 1, "float32"),
    Case("delta", "E", "trimmed mtp", 1, "float32", vocab=32000),
    Case("kda", "chain:0", "none", 1, "float32"),
    Case("kda", "chain:4", "lookup", 1, "bfloat16"),
    Case("kda", "E", "model", 8, "float32"),
    Case("kda", "binary:6", "model", 2, "bfloat16"),
    Case("lightning", "chain:0", "none", 1, "float32"),
    Case("lightning", "chain:4", "lookup", 1, "bfloat16"),
    Case("lightning", "E", "model", 8, "float32"),
    Case("lightning", "binary:6", "model", 2, "bfloat16"),
    Case("jamba", "chain:0", "none", 1, "float32"),
    Case("jamba", "chain:4", "lookup", 1, "bfloat16"),
    Case("jamba", "E", "model", 8, "float32"),
    Case("jamba", "binary:6", "model", 2, "bfloat16"),
]


def model_of(case: Case, layers: tuple, width: int) -> Model:
    kind = {"delta": _delta, "jamba": _jamba}.get(case.kind, _mamba)
    if "kda" in layers:
        kind = _kda
    config = ModelConfig(
        vocab_size=case.vocab,
        num_tokens=case.vocab,
        d_model=width,
        layers=layers,
        tie_embeddings=True,
        mixers=named(**kind(width), mlp=MLPConfig(2 * width)),
        mtp=("attention", "mlp") if "mtp" in case.drafter else (),
    )
    return abstract_model(config, np.dtype(case.dtype))


def _mamba(width: int) -> dict[str, Any]:
    return dict(
        lightning=LightningConfig(2 * width // 64, 64),
        mamba=MambaConfig(num_heads=2 * width // 64, head_dim=64, d_state=64),
        attention=AttentionConfig(width // 32, width // 64, 32, rope=Rope(1e4, 32)),
    )


def _jamba(width: int) -> dict[str, Any]:
    """Returns mixers as in Jamba, and Mamba2 for draft models."""
    mamba1 = Mamba1Config(2 * width, width // 16, norm="scaled")
    return dict(mamba1=mamba1, **_mamba(width))


def _delta(width: int) -> dict[str, Any]:
    """Returns mixers as in Qwen3.5."""
    heads, kv_heads = width // 32, width // 64
    rope = Rope(1e4, 8)
    return dict(
        delta=DeltaConfig(width // 64, 2 * width // 64, key_dim=64, value_dim=64),
        attention=AttentionConfig(
            heads, kv_heads, 32, rope=rope, qk_norm_eps=1e-6, gated=True
        ),
    )


def _kda(width: int) -> dict[str, Any]:
    """Returns mixers as in Kimi-Linear."""
    heads = width // 64
    return dict(
        kda=KDAConfig(heads, heads, 64, 64, decay_rank=64, gate_rank=64),
        mla=MLAConfig(heads, 64, 32, 64, rank=width // 2),
    )


def eagle_of(case: Case) -> Source:
    """Returns an EAGLE-3 or P-EAGLE drafter with a quarter of the vocabulary."""
    heads, d = case.width // 32, case.width
    one = AttentionConfig(heads, heads // 2, 32, rope=Rope(1e4, 32), d_out=d)
    parallel = case.drafter != "eagle"
    config = EagleConfig(
        vocab_size=case.vocab,
        num_tokens=case.vocab,
        d_model=d,
        layers=blocks((FIRST, "mlp")),
        mixers={FIRST: one, "mlp": MLPConfig(2 * d)},
        head_rows=case.vocab // 4,
        target_width=d,
        boundaries=(1, 2, 3),
        own_embedding=parallel,
        mask_token=0 if parallel else None,
    )
    return EagleSource.abstract(config, np.dtype(case.dtype))


def arguments(case: Case) -> tuple:
    """Returns the arguments of `memory_of` and `compiled_bytes`."""
    named = {"none": None, "lookup": "lookup", "mtp": "mtp"}
    drafter: Any = named.get(case.drafter)
    target = model_of(case, LAYERS[case.kind], case.width)
    if case.drafter == "model":
        drafter = model_of(case, ("mamba", "mamba"), case.width // 2)
    elif "eagle" in case.drafter:
        drafter = eagle_of(case)
    elif "block" in case.drafter:
        drafter = abstract_source(block_config(target.config, case), case.dtype)
    elif case.drafter == "trimmed mtp":
        config = TrimmedMTPConfig(target.config, case.vocab // 8)
        drafter = abstract_source(config, case.dtype)
    room = BufferSizes(case.batch, case.capacity, max_new_tokens=128)
    return target, drafter, case.tree, room


def block_config(target: ModelConfig, case: Case) -> DFlashConfig:
    """Returns a DSpark drafter of three layers."""
    width, last = case.width, boundary_count(target)
    return DFlashConfig(
        d_model=width,
        vocab_size=case.vocab,
        target_width=width,
        boundaries=(1, last // 2, last),
        layers=(DFlashLayer(),) * 3,
        attention=AttentionConfig(width // 32, width // 64, 32, rope=Rope(1e4, 32)),
        d_mlp=2 * width,
        slots=7,
        mask_token=0,
        from_root=True,
        pairs="vanilla",
        rank=64,
        confidence=True,
        head_rows=case.vocab // 8 if "trimmed" in case.drafter else 0,
    )


def compared(case: Case) -> tuple[int, int, int, int]:
    """Returns predicted and compiled bytes, and the temporaries in each."""
    args = arguments(case)
    predicted, compiled = memory_of(*args), compiled_bytes(*args)
    return (
        predicted.steps_total,
        compiled.total,
        predicted.temporaries.total,
        compiled.temporaries,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="cases whose name has this word")
    only = parser.parse_args().only
    cases = [case for case in CASES if only in case.name]
    print("| case | predicted MB | compiled MB | off | temporaries, both, MB |")
    print("| --- | --- | --- | --- | --- |")
    far = 0
    for case in cases:
        total, truth, own, true_own = compared(case)
        off = total / truth - 1
        far += abs(off) > LIMIT
        print(
            f"| {case.name} | {total / 1e6:.2f} | {truth / 1e6:.2f} | {off:+.1%} | "
            f"{own / 1e6:.2f}, {true_own / 1e6:.2f} |",
            flush=True,
        )
    print(f"\n{len(cases)} cases, {far} more than {LIMIT:.0%} off")
    return 1 if far or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
