#!/usr/bin/env bash
# transformers: loading a ZAYA checkpoint replaces one number of each router by -1.
#
# Expected: from_pretrained gives back what save_pretrained wrote, as for other models. Seen
# with transformers 5.24.0: of `balancing_biases`, the last entry, that of the class without an
# expert, is -1.0 after loading whatever the file has. The other entries are loaded. So the
# logits of a checkpoint with another bias change, without a message. The weights' own
# initialization sets this entry with a plain assignment, which loading does not skip.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cat > "$work/show.py" <<'PY'
import tempfile

import torch
from transformers import ZayaConfig, ZayaForCausalLM

torch.manual_seed(0)
config = ZayaConfig(
    vocab_size=64, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, num_hidden_layers=2, moe_intermediate_size=16, num_experts=3,
    router_hidden_size=8,
)
model = ZayaForCausalLM(config).eval()
names = [n for n, _ in model.named_buffers() if n.endswith("balancing_biases")]
for name in names:
    model.get_buffer(name).copy_(torch.tensor([0.5, 0.25, 0.125, 4.0]))
ids = torch.arange(8)[None]
with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    model.save_pretrained(folder)
    again = ZayaForCausalLM.from_pretrained(folder).eval()
    print(len(names), "routers")
    print("saved", model.get_buffer(names[0]).tolist())
    print("loaded", again.get_buffer(names[0]).tolist())
    change = (model(ids).logits - again(ids).logits).abs().max()
    print("logits", "differ" if change > 1e-3 else "are equal")
PY
found=$(HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore "$work/show.py" 2> "$work/log") ||
  { cat "$work/log"; exit 1; }
echo "$found"
expected="2 routers
saved [0.5, 0.25, 0.125, 4.0]
loaded [0.5, 0.25, 0.125, -1.0]
logits differ"
[[ $found == "$expected" ]]
