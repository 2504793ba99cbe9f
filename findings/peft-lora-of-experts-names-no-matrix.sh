#!/usr/bin/env bash
# peft: an adapter for the MLP modules of a mixture is saved for other things than were asked
# for, with another rank, and its tensors do not name their matrices.
#
# Expected: LoraConfig(r=4, target_modules=["gate_proj", "up_proj", "down_proj"]) on a mixture
# (Qwen3-MoE) gives tensors such as "experts.0.gate_proj.lora_A.weight" of rank 4, as published
# files name these matrices, or an error. Seen with peft 0.21.2 and transformers 5.23.0, which
# stores all experts of a layer in two parameters: the saved adapter_config.json has an empty
# `target_modules` and `target_parameters` instead; a `rank_pattern` gives "gate_up_proj" twice
# the rank; and the tensors are "experts.base_layer.lora_A" and "experts.lora_A": which of the
# two parameters one belongs to shows in its shape only, where the shapes differ. Rows of all
# experts lie in one matrix [experts * rank, inputs].
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
cat > "$work/show.py" <<'PY'
import json
import tempfile
import warnings
from pathlib import Path

from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

warnings.simplefilter("ignore")
config = Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4,
    num_experts_per_tok=2,
)
lora = LoraConfig(r=4, target_modules=["gate_proj", "up_proj", "down_proj"])
with tempfile.TemporaryDirectory() as folder:
    get_peft_model(Qwen3MoeForCausalLM(config), lora).save_pretrained(folder)
    saved = json.loads((Path(folder) / "adapter_config.json").read_text())
    print("target_modules", saved["target_modules"])
    print("target_parameters", sorted(saved["target_parameters"]))
    print("r", saved["r"], sorted(saved["rank_pattern"].values()))
    with safe_open(Path(folder) / "adapter_model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            print(name.partition("layers.0.")[2], file.get_slice(name).get_shape())
PY
found=$(HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore "$work/show.py" 2> "$work/log") ||
  { cat "$work/log"; exit 1; }
echo "$found"
expected="target_modules []
target_parameters ['down_proj', 'gate_up_proj']
r 4 [8]
mlp.experts.base_layer.lora_A.weight [32, 32]
mlp.experts.base_layer.lora_B.weight [32, 32]
mlp.experts.lora_A.weight [16, 16]
mlp.experts.lora_B.weight [32, 16]"
[[ $found == "$expected" ]]
