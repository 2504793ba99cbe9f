"""Compares checkpoints of quantizers with the quantizers' own numbers.

    python -m tests.quantizers_peers FOLDER [--python PYTHON]

Step 1, with PYTHON, which has the quantizers installed (auto-round 0.16, mlx-lm 0.32,
gptqmodel 7.7, all of them optional): writes a tiny Llama and each export of it into
FOLDER. Step 2: loads each export, and prints how far its weights and logits are from
the source, or the line that refuses it. Each scheme's error must be that of its bits.
For MLX it also compares the weights with `mx.dequantize`.

The exit status is 1 if an export crashes the loader, or an error is above its limit.
"""

import argparse
import subprocess
import sys
from pathlib import Path

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# By name: format and options of auto-round.
AUTO_ROUND = {
    f"{format}-{scheme}-{'sym' if sym else 'asym'}".replace(":", "_"): (
        format,
        {"scheme": scheme, "sym": sym},
    )
    for format in ("auto_round", "auto_gptq", "auto_awq", "auto_round:gptqmodel")
    for scheme in ("W4A16", "W8A16", "W2A16")
    for sym in (True, False)
} | {
    f"{format}-{scheme}": (format, {"scheme": scheme})
    for format in ("auto_round", "llm_compressor")
    for scheme in ("MXFP4", "NVFP4", "FP8_BLOCK", "INT8_W8A8", "W4A16_MIXED")
}
MLX = {
    **{f"mlx-{b}bit": {"quantize": True, "q_bits": b} for b in (2, 3, 4, 5, 6, 8)},
    **{f"mlx-{m}": {"quantize": True, "q_mode": m} for m in ("mxfp4", "nvfp4")},
    "mlx-group32": {"quantize": True, "q_bits": 4, "q_group_size": 32},
    "mlx-mixed": {"quantize": True, "quant_predicate": "mixed_4_6"},
    "mlx-plain": {"dtype": "bfloat16"},
}
# Largest error of a weight, relative to the largest weight, by a word of the name.
LIMITS = {"plain": 0, "8": 0.04, "MXFP4": 0.25, "NVFP4": 0.2, "": 0.1}


def write_source(path):
    """Writes a random Llama and a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, bos_token_id=None, eos_token_id=None)
    LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)


def with_auto_round(source, folder, name):
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    format, options = AUTO_ROUND[name]
    model = AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(source)
    rounding = {"iters": 0, "disable_opt_rtn": True}  # to nearest, without data
    quantizer = AutoRound(model, tokenizer, **rounding, **options)
    quantizer.quantize_and_save(output_dir=str(folder), format=format)


def with_mlx(source, folder, name):
    import mlx.core as mx
    import numpy as np
    from mlx_lm import convert
    from safetensors.numpy import save_file

    convert(str(source), mlx_path=str(folder), **MLX[name])
    stored = mx.load(str(folder / "model.safetensors"))
    found = {}
    for key in [k for k in stored if k.endswith(".biases")]:
        module = key.removesuffix(".biases")
        w, scales, biases = (
            stored[f"{module}.{part}"] for part in ("weight", "scales", "biases")
        )
        down = module.endswith("down_proj")
        columns = SIZES["intermediate_size" if down else "hidden_size"]
        group, bits = columns // scales.shape[-1], w.shape[-1] * 32 // columns
        exact = mx.dequantize(
            w, scales.astype(mx.float32), biases.astype(mx.float32), group, bits
        )
        found[f"{module}.weight"] = np.array(exact)
    if found:
        (folder.parent / "exact").mkdir(exist_ok=True)
        save_file(found, folder.parent / "exact" / f"{name}.safetensors")


def write_all(folder):
    """Writes every export whose quantizer is installed."""
    write_source(folder / "source")
    for names, make in ((AUTO_ROUND, with_auto_round), (MLX, with_mlx)):
        for name in names:
            try:
                make(folder / "source", folder / name, name)
            except Exception as error:
                reason = (str(error).splitlines() or [""])[0]
                print(f"{name:32} not written: {type(error).__name__} {reason:.100}")


def compare(folder):
    """Prints a line for each export. Returns the number of faults."""
    import numpy as np
    from safetensors.numpy import load_file

    import stree_jax
    from stree_jax.convert import CheckpointError, CheckpointFiles, open_local
    from stree_jax.models import by_path

    source = stree_jax.load(folder / "source", dtype="float32")
    wanted = {p: np.asarray(w) for p, w in by_path(source.params).items()}
    tokens = np.arange(24)[None]
    logits, faults = np.asarray(stree_jax.score(source, tokens)), 0
    for name in [*AUTO_ROUND, *MLX]:
        configs = sorted((folder / name).glob("**/config.json"))
        if not configs:
            continue
        path = configs[0].parent
        try:
            model = stree_jax.load(path, dtype="float32")
        except CheckpointError as error:
            print(f"{name:32} refused: {str(error).removeprefix(str(path))}")
            continue
        except Exception as error:
            print(f"{name:32} CRASH: {error!r}")
            faults += 1
            continue
        found = {p: np.asarray(w) for p, w in by_path(model.params).items()}
        error = max(
            np.abs(found[p] - w).max() / np.abs(w).max() for p, w in wanted.items()
        )
        ours = np.asarray(stree_jax.score(model, tokens))
        change = np.abs(ours - logits).max() / np.abs(logits).max()
        limit = next(limit for word, limit in LIMITS.items() if word in name)
        exact = folder / "exact" / f"{name}.safetensors"
        note = ""
        if exact.exists():
            opened = open_local(CheckpointFiles(path)).source
            off = max(
                np.abs(opened.read(n) - w).max() / np.abs(w).max()
                for n, w in load_file(exact).items()
            )
            note = f"  from its own dequantization {off:.1e}"
            faults += off > 1e-6
        faults += error > limit
        print(f"{name:32} weights {error:.3f} (<= {limit})  logits {change:.3f}{note}")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--write", action="store_true", help="only step 1, here")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.write:
        write_all(args.folder)
        return 0
    command = [args.python, __file__, str(args.folder), "--write"]
    subprocess.run(command, check=True)
    return int(compare(args.folder) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
