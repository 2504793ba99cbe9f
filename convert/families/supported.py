"""The supported checkpoint formats, for messages and for the table in
docs/reference/supported-models.md."""

from typing import NamedTuple


class Family(NamedTuple):
    """A checkpoint format.

    Attributes:
      name: its `model_type`, or the file or field by which it is recognised.
      models: models in this format.
      compared: implementation that its logits are tested against.
      exported: description of whether `stree-jax export` writes it.
    """

    name: str
    models: str
    compared: str
    exported: str


THEIRS = "transformers 5.23"
YES, NO = "yes", "no"
OURS = "an independent float64 recomputation"
QWEN = "Qwen3.5, 3.6 and 3.8: Gated DeltaNet and attention, "
FAMILIES = (
    Family(
        "ssm_cfg (state-spaces)",
        "Mamba2, with attention layers or MLPs",
        OURS,
        "as mamba2, if it can be",
    ),
    Family("mamba", "MambaForCausalLM (state-spaces/mamba-*-hf)", THEIRS, YES),
    Family("falcon_mamba", "Falcon-Mamba", THEIRS, YES),
    Family("mamba2", "Mamba2ForCausalLM", THEIRS, YES),
    Family("llama", "LlamaForCausalLM, llama3 rotary scaling", THEIRS, YES),
    Family("qwen2", "Qwen2, Qwen2.5 (dense)", THEIRS, YES),
    Family("qwen3", "Qwen3 (dense)", THEIRS, YES),
    Family(
        "qwen3_next",
        "Qwen3-Next: Gated DeltaNet and attention, with experts",
        THEIRS,
        "yes; as qwen3_5_moe_text if all layers have experts",
    ),
    Family(
        "qwen3_5", QWEN + "dense, within a multimodal model", THEIRS, "as qwen3_5_text"
    ),
    Family("qwen3_5_text", QWEN + "dense", THEIRS, YES),
    Family(
        "qwen3_5_moe",
        QWEN + "with experts, within a multimodal model",
        THEIRS,
        "as qwen3_5_moe_text",
    ),
    Family("qwen3_5_moe_text", QWEN + "with experts", THEIRS, YES),
    Family(
        "mistral", "MistralForCausalLM", THEIRS, "as llama, without a sliding window"
    ),
    Family("gemma3", "Gemma 3 within a multimodal model", THEIRS, "as gemma3_text"),
    Family("gemma3_text", "Gemma 3: attention with and without a window", THEIRS, YES),
    Family(
        "gpt_oss",
        "gpt-oss: attention with sinks, with and without a window, and experts",
        THEIRS,
        "yes, in floats",
    ),
    Family("granite", "Granite 3, dense", THEIRS, "as granitemoehybrid"),
    Family("granitemoe", "Granite 3 with experts", THEIRS, YES),
    Family(
        "granitemoeshared",
        "Granite 3 with experts beside an MLP",
        THEIRS,
        "as granitemoehybrid",
    ),
    Family(
        "granitemoehybrid",
        "Granite 4: hybrid, attention only, rotary or none, with experts or without",
        THEIRS,
        YES,
    ),
    Family(
        "nemotron_h",
        "Nemotron-H, dense or with experts (groups, latent width)",
        THEIRS,
        YES,
    ),
    Family("falcon_h1", "Falcon-H1: mixer and attention side by side", THEIRS, YES),
    Family("bamba", "Bamba", THEIRS, YES),
    Family("zamba2", "Zamba2: shared transformer blocks with adapters", THEIRS, YES),
    Family("jamba", "Jamba: Mamba-1 and attention, with experts", THEIRS, YES),
    Family("olmo_hybrid", "Olmo-Hybrid: Gated DeltaNet and attention", THEIRS, YES),
    Family("lfm2", "LFM2 and LFM2.5: short convolutions and attention", THEIRS, YES),
    Family("lfm2_moe", "LFM2 with experts (LFM2-8B-A1B)", THEIRS, YES),
    Family(
        "lfm3",
        "LFM3: short convolutions, attention with and without a window",
        THEIRS,
        YES,
    ),
    Family(
        "kimi_linear",
        "Kimi-Linear: Kimi Delta Attention and latent attention, with experts",
        THEIRS,
        YES,
    ),
    Family(
        "bailing_hybrid",
        "Ling-3: Kimi Delta Attention and latent attention, with experts",
        THEIRS,
        YES,
    ),
    Family(
        "minimax",
        "MiniMax-01 and MiniMax-M1: lightning attention and attention, with experts",
        THEIRS,
        "yes, if whole heads rotate",
    ),
    Family("minimax_text_01", "MiniMax-Text-01 as published", OURS, "as minimax"),
    Family("minimax_m1", "MiniMax-M1 as published", OURS, "as minimax"),
    Family("mamba_config.json", "MambaInLlama, Mamba-2 flavour", OURS, NO),
)


def names() -> str:
    """Returns the names of all formats, for error messages."""
    return ", ".join(family.name for family in FAMILIES)


def table() -> str:
    """Returns the table of docs/reference/supported-models.md."""
    lines = [
        "| format | models | logits tested against | export |",
        "| --- | --- | --- | --- |",
    ]
    for f in FAMILIES:
        lines.append(f"| `{f.name}` | {f.models} | {f.compared} | {f.exported} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
