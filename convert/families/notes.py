"""Warnings about settings of a checkpoint that transformers applies and this library
does not."""

import reprlib
from collections.abc import Iterator

from stree_jax.convert.tensors.fields import ConfigFields

# Fields of generation_config.json that change the tokens of transformers' `generate`
# even without sampling, with the values that have no effect. Settings of sampling, such
# as the temperature, are not included: here, sampling is an argument of the call.
GENERATION_NEUTRAL = {
    "repetition_penalty": (1, None),
    "encoder_repetition_penalty": (1, None),
    "no_repeat_ngram_size": (0, None),
    "encoder_no_repeat_ngram_size": (0, None),
    "bad_words_ids": ([], None),
    "suppress_tokens": ([], None),
    "begin_suppress_tokens": ([], None),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "min_length": (0, None),
    "min_new_tokens": (0, None),
    "sequence_bias": ([], {}, None),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (1, None),
    "num_beams": (1, None),
    "penalty_alpha": (0, None),
    "dola_layers": (None,),
    "watermarking_config": (None,),
}


def generation_notes(fields: ConfigFields) -> Iterator[str]:
    """Yields warnings about fields of generation_config.json that are not applied."""
    for name, neutral in GENERATION_NEUTRAL.items():
        value = fields.values.get(name)
        if value in neutral:
            continue
        hint = ""
        if name == "repetition_penalty":
            hint = f"; Sampling(temperature=0, {name}={value!r:.20}) applies it"
        yield (
            f"{fields.file}: {name} {reprlib.repr(value)} is not applied here, though "
            f"generate of transformers does so by default{hint}"
        )


def rescaling_notes(fields: ConfigFields) -> Iterator[str]:
    """Yields a warning if transformers divides weights of this Mamba config."""
    name = "rescale_prenorm_residual"
    if fields.get(name, False) is True:
        yield (
            f"{fields.file}: {name} is about training; transformers 5.24 also divides "
            "out_proj by the square root of the depth when it loads the weights, which "
            "are used here as they are"
        )
