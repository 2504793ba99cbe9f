"""LoRA adapters in the layout of peft's files, and transformers' models with them.

The models compute as peft does before merging: a hook adds the low-rank product to the
output of a module. Nothing of `convert` is used.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What peft 0.21 writes for options at their defaults.
DEFAULTS = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "OWNER/NAME",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.1,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "peft_version": "0.21.0",
    "qalora_group_size": 16,
    "r": 4,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}


@dataclass(frozen=True)
class LowRank:
    """The tensors that an adapter has for a module.

    Attributes:
      down: lora_A [rank, in], or lora_embedding_A [rank, tokens].
      up: lora_B [out, rank], or lora_embedding_B [width, rank].
      factor: factor of the product.
      embedding: True if the module is an embedding.
      norms: lora_magnitude_vector [out], for DoRA only.
    """

    down: np.ndarray
    up: np.ndarray
    factor: float
    embedding: bool = False
    norms: np.ndarray | None = None

    def tensors(self, module):
        """Returns the tensors by their names in the file."""
        prefix = f"base_model.model.{module}.lora_"
        if self.embedding:
            return {f"{prefix}embedding_A": self.down, f"{prefix}embedding_B": self.up}
        found = {f"{prefix}A.weight": self.down, f"{prefix}B.weight": self.up}
        if self.norms is not None:
            found[f"{prefix}magnitude_vector"] = self.norms
        return found

    def output(self, module, inputs, output):
        """Computes the output of a module with the adapter: a hook of torch."""
        down, up = torch.tensor(self.down), torch.tensor(self.up)
        if self.embedding:
            return output + self.factor * (down.T[inputs[0]] @ up.T)
        added = self.factor * (inputs[0] @ down.T @ up.T)
        if self.norms is None:
            return output + added
        rows = (module.weight + self.factor * up @ down).norm(dim=1)
        bias = 0 if module.bias is None else module.bias
        return torch.tensor(self.norms) / rows * (output - bias + added) + bias


def low_rank(model, endings=None, rank=4, factor=2.0, own=None, dora=False):
    """Returns a random `LowRank` for each linear module or embedding, by name.

    Args:
      model: a model of transformers.
      endings: endings of the modules' names. If None, all linear modules but the head.
      rank, factor: of all modules except those in `own`.
      own: (rank, factor) by ending of the name.
      dora: True to add norms.
    """
    rng, found = np.random.default_rng(3), {}
    for name, module in model.named_modules():
        linear = isinstance(module, torch.nn.Linear)
        wanted = linear and name != "lm_head" if endings is None else False
        if endings is not None and name.endswith(tuple(endings)):
            wanted = linear or isinstance(module, torch.nn.Embedding)
        if not wanted:
            continue
        ending = next((e for e in own or () if name.endswith(e)), None)
        r, scale = (rank, factor) if ending is None else own[ending]
        m, k = module.weight.shape
        shapes = ((r, k), (m, r)) if linear else ((r, m), (k, r))
        down, up = (rng.normal(size=s).astype(np.float32) for s in shapes)
        up *= np.float32(0.3 / scale / np.sqrt(r * (k if linear else 1)))
        norms = np.abs(1 + 0.3 * rng.normal(size=m)).astype(np.float32)
        found[name] = LowRank(down, up, scale, not linear, norms if dora else None)
    assert found
    return found


def write(directory, layers, whole: Mapping[str, np.ndarray] | None = None, **config):
    """Writes an adapter's directory.

    Args:
      directory: the directory to create.
      layers: results of `low_rank`.
      whole: tensors that are saved whole, by their names without peft's prefix.
      config: fields of the config that are not at their defaults.
    """
    directory.mkdir()
    tensors = {}
    for module, layer in layers.items():
        tensors |= layer.tensors(module)
    for name, tensor in (whole or {}).items():
        tensors[f"base_model.model.{name}"] = tensor
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(DEFAULTS | config))
    return directory


def edit(directory, change):
    """Applies `change` to the tensors of an adapter, in place."""
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})


def logits(model, layers, tokens):
    """Returns transformers' logits with an adapter that is not merged."""
    with ExitStack() as stack, torch.no_grad():
        for name, layer in layers.items():
            hook = model.get_submodule(name).register_forward_hook(layer.output)
            stack.callback(hook.remove)
        return model(torch.tensor(tokens)[None]).logits[0].numpy()
