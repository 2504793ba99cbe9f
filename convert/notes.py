"""What a checkpoint says and nothing here follows, though transformers does."""

import reprlib
from collections.abc import Iterator

from stree_jax.convert.fields import ConfigFields

# Fields of generation_config.json that change which token transformers' `generate`
# takes even without sampling, and the values that change nothing. Temperature and the
# like are not among them: here, too, a caller has to ask for sampling.
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
    """Yields warnings about fields of generation_config.json that are not followed."""
    for name, neutral in GENERATION_NEUTRAL.items():
        value = fields.values.get(name)
        if value in neutral:
            continue
        way_on = ""
        if name == "repetition_penalty":
            way_on = f"; Sampling(temperature=0, {name}={value!r:.20}) follows it"
        yield (
            f"{fields.file}: {name} {reprlib.repr(value)} is not applied here, though "
            f"generate of transformers does so by default{way_on}"
        )


def config_notes(fields: ConfigFields, format: str) -> Iterator[str]:
    """Yields a warning for each field of config.json that transformers misreads."""
    name = "rescale_prenorm_residual"
    if format.startswith("mamba2") and fields.get(name, False) is True:
        yield (
            f"{fields.file}: {name} is about training; transformers 5.23 also divides "
            "out_proj by the square root of the depth when it loads the weights, which "
            "are used here as they are"
        )
