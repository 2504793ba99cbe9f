"""Reads LoRA adapters as peft saves them: a config and low-rank matrices by module."""

import math
import reprlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.families.tensors import check_dtype
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tensors.gguf_header import is_gguf, read_header
from stree_jax.convert.tensors.recipe import read_pattern, strings
from stree_jax.convert.tensors.stored_tensors import Tensors
from stree_jax.convert.tensors.tensor_files import ADAPTER, is_file, open_files
from stree_jax.models.stack.config_json import MAX_SIZE

WEIGHTS = "adapter_model.safetensors"
FILES = ((ADAPTER,), (WEIGHTS,))  # to download from the hub
PREFIX = "base_model.model."  # of the names in a file of peft
LORA = "lora_"  # beginning of the last parts of a low-rank tensor's name
BASE_LAYER = ".base_layer."  # in the name of a weight that is saved next to LoRA's
# Values of `init_lora_weights` that leave the base's weights as they are.
INITIAL = (True, False, "gaussian", "eva", "orthogonal")
# Fields that are read here, and fields that do not change the numbers: the tensors show
# which modules have an adapter, and which biases and modules are saved whole. peft
# ignores `fan_in_fan_out` for linear modules; only GPT-2 has others.
KNOWN = frozenset(
    "peft_type r lora_alpha use_rslora rank_pattern alpha_pattern use_dora "
    "init_lora_weights modules_to_save "
    "auto_mapping base_model_name_or_path bias eva_config exclude_modules "
    "fan_in_fan_out inference_mode layers_pattern layers_to_transform loftq_config "
    "lora_dropout megatron_core peft_version qalora_group_size revision runtime_config "
    "target_modules task_type".split()
)
INSTEAD = "merge the adapter with peft (merge_and_unload) and save the result"


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter whose config and tensor headers have been read.

    Attributes:
      fields: the fields of adapter_config.json.
      source: the tensors.
    """

    fields: ConfigFields
    source: Tensors

    def error(self, name: str, problem: str) -> CheckpointError:
        """Returns an error about a tensor of the adapter."""
        return CheckpointError(f"{self.source.tensors[name].file}: {name}: {problem}")

    def check(self, name: str, shape: tuple[int, ...], reason: str) -> None:
        """Raises CheckpointError if a tensor has another shape or is not of floats."""
        info = self.source.tensors[name]
        if info.shape != shape:
            found = f"got {list(info.shape)}"
            raise self.error(name, f"want shape {list(shape)} by {reason}, {found}")
        check_dtype(name, info)

    def modules(self) -> Mapping[str, Mapping[str, str]]:
        """Returns the names of the tensors by the base's module and by role, such as
        "lora_A.weight", or "weight" for one that replaces the module's own."""
        found: dict[str, dict[str, str]] = defaultdict(dict)
        for name in sorted(self.source.tensors):
            place = name.removeprefix(PREFIX)
            module, is_low_rank, role = place.rpartition(f".{LORA}")
            if is_low_rank:
                role = LORA + role
            else:
                module, _, role = place.replace(BASE_LAYER, ".").rpartition(".")
            found[module][role] = name
        return found

    @property
    def has_norms(self) -> bool:
        """True if the rows of sums are normalized (DoRA)."""
        return self.fields.truth("use_dora", False)

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Returns the rank of a module's matrices, and the factor of their product."""
        rank = self.fields.size("r", 8)
        alpha = self.fields.finite("lora_alpha", 8)
        ranks = self.fields.object("rank_pattern")
        alphas = self.fields.object("alpha_pattern")
        if (key := _matching(ranks, module)) is not None:
            rank = ranks.size(key, top=MAX_SIZE)
        if (key := _matching(alphas, module)) is not None:
            alpha = alphas.finite(key)
        stabilized = self.fields.truth("use_rslora", False)
        return rank, alpha / (math.sqrt(rank) if stabilized else rank)

    def is_copied(self, module: str) -> bool:
        """True if the training was of a copy of a module (`modules_to_save`), so that
        a weight that the base ties to the module's is unchanged."""
        return module.endswith(tuple(strings(self.fields, "modules_to_save")))


def _matching(patterns: ConfigFields, module: str) -> str | None:
    """Returns the first key that matches the last parts of a module's name, or None."""
    for key in patterns.values:
        if read_pattern(patterns, key, rf"(.*\.)?({key})$").match(module):
            return key
    return None


def open_adapter(path: Path) -> Adapter:
    """Opens an adapter's directory. Reads only the config and headers.

    Raises:
      CheckpointError: it is not a LoRA adapter of peft, or has an option that is not
        supported. The message is one line with the file and the field.
    """
    if is_gguf(path):
        kind = read_header(path).values.get("general.type")
        raise CheckpointError(
            f"{path}: a GGUF file (general.type: {reprlib.repr(kind)}); want peft's "
            f"directory, with {ADAPTER} and {WEIGHTS}"
        )
    if not is_file(path / ADAPTER):
        raise CheckpointError(f"{path}: not an adapter of peft: no {ADAPTER}")
    fields = ConfigFields.read(path / ADAPTER)
    _check_options(fields)
    if not is_file(path / WEIGHTS):
        raise CheckpointError(f"{path}: no {WEIGHTS}; save the adapter with peft again")
    source = open_files(path, [path / WEIGHTS])
    if not source.tensors:
        raise CheckpointError(f"{path / WEIGHTS}: has no tensors")
    return Adapter(fields, source)


def _check_options(fields: ConfigFields) -> None:
    """Raises CheckpointError for an option that changes the numbers in a way that is
    not supported."""
    fields.choice("peft_type", None, ("LORA",))
    initial = fields.get("init_lora_weights", True)
    if initial not in INITIAL:
        what = f"{reprlib.repr(initial)} also changes the base's weights; {INSTEAD}"
        raise fields.error("init_lora_weights", what)
    for name, value in fields.values.items():
        if value and name not in KNOWN:
            what = f"{reprlib.repr(value)} is not supported; {INSTEAD}"
            raise fields.error(name, what)
