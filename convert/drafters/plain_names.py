"""Names of the tensors of published drafters, as most publishers write them. Imports no
jax."""

import re
from collections.abc import Iterable

FC = "fc.weight"
MASK, MASK_FILE = "mask_embedding", "mask_embedding.pt"
LAYER, ATTENTION, MLP = "layers.{i}.", "layers.{i}.self_attn.", "layers.{i}.mlp."
PREFIXES = ("model.", "draft_model.", "logit_head.")
ALIASES = {
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "markov_w1.": "markov_head.markov_w1.",
    "markov_w2.": "markov_head.markov_w2.",
    "gate_proj.": "markov_head.gate_proj.",
    "joint_proj.": "markov_head.joint_proj.",
    "confidence_proj.": "confidence_head.proj.",
}


def plain_name(name: str) -> str:
    """Returns the name that most publishers give to a tensor."""
    while prefix := next((p for p in PREFIXES if name.startswith(p)), ""):
        name = name.removeprefix(prefix)
    for alias, plain in ALIASES.items():
        if name.startswith(alias):
            return plain + name.removeprefix(alias)
    if name.startswith(MASK):
        return MASK
    return re.sub(r"(_codebook)\.weight$", r"\1", name)


def is_block(names: Iterable[str]) -> bool:
    """True if tensors of these names are a block drafter: layers that read projected
    layers of a target."""
    found = set(map(plain_name, names))
    query = f"{ATTENTION.format(i=0)}q_proj.weight"
    return {FC, "hidden_norm.weight", query} <= found


def eagle_name(name: str) -> str:
    """Converts a publisher's name of a tensor to the name that the speculators library
    gives it."""
    name = plain_name(name)
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    return name


def is_eagle(names: Iterable[str]) -> bool:
    """True if tensors of these names are an EAGLE drafter: a projection, and a first
    layer that reads pairs (EAGLE-3) or has no norm before its attention (EAGLE-2)."""
    found = set(map(eagle_name, names))
    first = LAYER.format(i=0)
    if f"{ATTENTION.format(i=0)}q_proj.weight" not in found:
        return False
    pairs = f"{first}hidden_norm.weight" in found
    fused = FC in found and f"{first}input_layernorm.weight" not in found
    return pairs or fused
