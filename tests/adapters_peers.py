"""Compares merged LoRA adapters with peft, which has to be installed (0.21).

    python -m tests.adapters_peers FOLDER

For each tiny model of transformers and each set of options, peft writes an adapter with
random matrices into FOLDER. Prints how far the logits of `load(.., adapter=..)` are
from those of peft's model, which does not merge, or the line that refuses the adapter.

The exit status is 1 if a difference is above `LIMIT`.
"""

import argparse
import sys
import warnings
from pathlib import Path

import numpy as np
import torch

import stree_jax
from stree_jax.convert import CheckpointError
from tests.support.hf_checkpoints import HF_CASES
from tests.support.mistakes import TOKENS

LIMIT = 1e-4
MODELS = ("llama", "qwen3", "granite", "bamba", "qwen3-next", "qwen3-5", "mamba2")
LINEAR = {"target_modules": "all-linear"}
# Where "all-linear" includes what peft does not allow, or experts.
OWN = {
    "qwen3-next": {
        "target_modules": "q_proj k_proj v_proj o_proj in_proj_qkvz in_proj_ba "
        "out_proj shared_expert_gate".split()
    },
    "mamba2": {"target_modules": ["in_proj"]},
}
OPTIONS = {
    "stabilized": {**LINEAR, "use_rslora": True, "r": 9, "lora_alpha": 5},
    "patterns": {
        **LINEAR,
        "rank_pattern": {r"layers\.0\.self_attn\.q_proj": 2, "q_proj": 3},
        "alpha_pattern": {"^model.layers.[01].mlp.down_proj": 5, "v_proj": 1},
    },
    "dora": {**LINEAR, "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "v_proj"]},
    "biases": {"target_modules": ["q_proj", "down_proj"], "bias": "all"},
    "copies": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens", "model.norm"],
    },
    "one-layer": {"target_modules": ["q_proj"], "layers_to_transform": [1]},
    "transposed": {**LINEAR, "fan_in_fan_out": True},
    "gaussian": {**LINEAR, "init_lora_weights": "gaussian"},
    "orthogonal": {**LINEAR, "init_lora_weights": "orthogonal"},
    "pissa": {**LINEAR, "init_lora_weights": "pissa"},
    "bias-of-b": {"target_modules": ["q_proj"], "lora_bias": True},
}


def write(model, folder, options):
    """Writes an adapter with peft, and returns the logits of peft's model."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        **{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **options}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, config).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, p in adapted.named_parameters():
                if "lora_" in name or p.requires_grad:
                    noise = torch.randn(p.shape, generator=generator)
                    p.add_(0.1 * noise)
        adapted.save_pretrained(folder)
    with torch.no_grad():
        return adapted(input_ids=torch.tensor(TOKENS)[None]).logits[0].numpy()


def compare(name, option, options, root):
    """Returns the largest difference of logits, or the line of a refusal, and how much
    the adapter changes the logits."""
    model = HF_CASES[name]()
    folder = root / f"{name}-{option}"
    model.save_pretrained(folder / "base")
    with torch.no_grad():
        before = model(torch.tensor(TOKENS)[None]).logits[0].numpy()
    wanted = write(model, folder / "adapter", options)
    try:
        ours = stree_jax.load(folder / "base", adapter=folder / "adapter")
    except CheckpointError as error:
        return str(error), 0.0
    found = np.asarray(stree_jax.score(ours, TOKENS[None])[0])
    return float(np.abs(found - wanted).max()), float(np.abs(wanted - before).max())


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="*", default=MODELS, choices=list(HF_CASES))
    args = parser.parse_args(arguments)
    todo = [(name, "linear", OWN.get(name, LINEAR)) for name in args.models]
    for name in {"llama", "qwen3"} & {*args.models}:
        todo += [(name, option, options) for option, options in OPTIONS.items()]
    wrong = 0
    for name, option, options in todo:
        found, change = compare(name, option, options, args.folder)
        if isinstance(found, float):
            wrong += found > LIMIT
            found = f"{found:.1e} (the adapter changes them by {change:.2f})"
        print(f"{name} {option}: {found}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
