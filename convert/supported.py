"""The formats that can be read, in one place: for messages and for the README."""

from typing import NamedTuple


class Family(NamedTuple):
    """A checkpoint format.

    Attributes:
      name: how it is recognised: its `model_type`, or the file or field that marks it.
      models: what it holds.
      compared: what its logits are tested against.
      exported: whether `stree-jax export` writes it.
    """

    name: str
    models: str
    compared: str
    exported: bool


THEIRS = "transformers 5.23"
OURS = "an independent float64 recomputation"
FAMILIES = (
    Family(
        "ssm_cfg (state-spaces)", "Mamba2, with attention layers or MLPs", OURS, False
    ),
    Family("mamba2", "Mamba2ForCausalLM", THEIRS, True),
    Family("llama", "LlamaForCausalLM, llama3 rotary scaling", THEIRS, True),
    Family(
        "granitemoehybrid",
        "Granite 4: hybrid, attention only, rotary or none, with experts or without",
        THEIRS,
        True,
    ),
    Family(
        "nemotron_h",
        "Nemotron-H, dense or with experts (groups, latent width)",
        THEIRS,
        True,
    ),
    Family("falcon_h1", "Falcon-H1: mixer and attention side by side", THEIRS, True),
    Family("bamba", "Bamba", THEIRS, True),
    Family("zamba2", "Zamba2: shared transformer blocks with adapters", THEIRS, True),
    Family("mamba_config.json", "MambaInLlama, Mamba-2 flavour", OURS, False),
)


def names() -> str:
    return ", ".join(family.name for family in FAMILIES)


def table() -> str:
    """The table of the README."""
    lines = [
        "| format | models | logits tested against | export |",
        "| --- | --- | --- | --- |",
    ]
    for f in FAMILIES:
        written = "yes" if f.exported else "no"
        if f.name.startswith("ssm_cfg"):
            written = "as mamba2, if it can be"
        lines.append(f"| `{f.name}` | {f.models} | {f.compared} | {written} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
