"""Fields of a drafter's config.json, wherever its publisher writes them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.families.configs import Warn
from stree_jax.convert.tensors.fields import ConfigFields

NESTED, BLOCK = "transformer_layer_config", "dflash_config"
SPECULATORS = "speculators_config"
# Names of the target's field in flat configs
TARGETS = (
    "target_model_name_or_path",
    "target_model_path",
    "target_model",
    "base_model_name_or_path",
)
# Lists of the target's layers: numbers of layers whose output is read, and boundaries.
OUTPUTS = ("target_layer_ids", "dspark_target_layer_ids", "layer_ids")
BOUNDARIES = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
# Fields that only configs of drafters have, and words in the names of their classes.
FIELDS = {BLOCK, SPECULATORS, "speculators_model_type", "eagle_config"}
FIELDS |= {OUTPUTS[0], *BOUNDARIES, "markov_rank", "draft_vocab_size"}
FIELDS |= {"backbone_hidden_size"}  # of assistants of Gemma 4
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")  # values of `model_type`
CLASSES = ("Eagle", "EAGLE", "DFlash", "DSpark", "DraftModel", "Speculator")

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Fields:
    """A block drafter's config file and shapes, while its architecture is read.

    Attributes:
      whole: the fields of config.json.
      shapes: shapes of the tensors, by their plain names.
      warn: called with a line for each assumption. If None, nothing is reported.
    """

    whole: ConfigFields
    shapes: Shapes
    warn: Warn | None = None

    @property
    def by_speculators(self) -> bool:
        """True if the speculators library wrote the config."""
        values = self.whole.values
        return not {NESTED, SPECULATORS, "speculators_model_type"}.isdisjoint(values)

    @property
    def layer(self) -> ConfigFields:
        """The fields with the sizes of a layer."""
        return self.whole.object(NESTED) if NESTED in self.whole.values else self.whole

    @property
    def nested(self) -> ConfigFields:
        """The fields of `dflash_config`."""
        return self.whole.object(BLOCK)

    @property
    def architecture(self) -> str:
        """The name of the drafter's class, or ""."""
        names = self.whole.get("architectures", None)
        first = names[0] if isinstance(names, list) and names else ""
        return first if isinstance(first, str) else ""

    def warned(self, text: str) -> None:
        if self.warn is not None:
            self.warn(f"{self.whole.file}: {text}")

    def error(self, text: str) -> CheckpointError:
        """Returns an error that names the drafter's directory."""
        return CheckpointError(f"{self.whole.file.parent}: {text}")

    def all(self, *names: str) -> Iterator[tuple[ConfigFields, str]]:
        """Yields each field that has one of several names and is not null."""
        places = [self.whole, self.nested]
        if NESTED in self.whole.values:
            places.append(self.layer)
        for name in names:
            for fields in places:
                if fields.get(name, None) is not None:
                    yield fields, name

    def one(self, *names: str) -> tuple[ConfigFields, str] | None:
        """Finds the field that has one of several names. Returns None if the config has
        none of them.

        Raises:
          CheckpointError: two such fields have different values.
        """
        found = list(self.all(*names))
        for fields, name in found[1:]:
            first, other = found[0]
            if fields.get(name) != first.get(other):
                raise fields.error(
                    name,
                    f"is {fields.get(name)!r}, but {first.within}{other} is "
                    f"{first.get(other)!r}",
                )
        return found[0] if found else None

    def value(self, *names: str) -> Any:
        """Returns the value of the field that has one of several names, or None if the
        config has none of them."""
        found = self.one(*names)
        return None if found is None else found[0].get(found[1])

    def flag(self, *names: str) -> bool | None:
        """Returns the flag that has one of the names, or None."""
        found = self.one(*names)
        return None if found is None else found[0].flag(found[1], False)

    def size(self, *names: str, low: int = 1) -> int | None:
        """Returns the integer that has one of the names, or None."""
        found = self.one(*names)
        return None if found is None else found[0].size(found[1], low=low)

    def required(self, *names: str, low: int = 1) -> int:
        """Returns the integer that has one of the names.

        Raises:
          CheckpointError: it is missing.
        """
        found = self.size(*names, low=low)
        if found is None:
            raise self.whole.error(names[0], "is missing")
        return found

    def shape(self, name: str, axes: int) -> tuple[int, ...]:
        """Returns a tensor's shape.

        Raises:
          CheckpointError: the tensor is missing, or has another number of axes.
        """
        if name not in self.shapes:
            raise self.error(f"{name} is missing")
        shape = self.shapes[name]
        if len(shape) != axes:
            raise self.error(f"{name}: want {axes} axes, got {list(shape)}")
        return shape


def target_name(whole: ConfigFields) -> str:
    """Returns the name of the model that a drafter was trained for; "" if its config
    does not say."""
    stated = [whole.object(SPECULATORS).object("verifier").get("name_or_path", "")]
    stated += [whole.get(name, "") for name in TARGETS]
    return next((name for name in stated if name and isinstance(name, str)), "")


def has_drafter_fields(config_json: Mapping[str, Any]) -> bool:
    """True if the fields of a config.json show that it is a drafter's."""
    architectures = config_json.get("architectures")
    listed = architectures if isinstance(architectures, list) else []
    classes = " ".join(map(str, listed))
    return not FIELDS.isdisjoint(config_json) or any(c in classes for c in CLASSES)


def is_assistant(config_json: Mapping[str, Any]) -> bool:
    """True if the fields of a config.json are those of an assistant."""
    return config_json.get("model_type") in ASSISTANTS
