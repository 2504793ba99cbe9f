"""Which tokens of a GGUF file end a generation: the rules of llama.cpp.

Source: `llama_vocab::impl::load` in llama.cpp's `llama-vocab.cpp`. It goes by the text
of a token, whatever its type in the file: converters have often set that wrongly.
"""

from collections.abc import Iterable, Mapping, Sequence

CONTROL, USER_DEFINED = 3, 4  # types of tokens in GGUF files
END_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek's
    "[e~[",
)
# Tokens of models that fill in the middle of a file, by the name in the file's keys.
# Without a key, the first of these texts that is a token has the role.
FILL_IN_TEXTS = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
FILL_IN_ENDS = ("fim_pad", "fim_rep", "fim_sep")


def end_ids(
    tokens: Sequence[str], named: Iterable[int], fill_in: Mapping[str, int]
) -> tuple[int, ...]:
    """Returns the ids of all tokens that end a generation, the named ones first.

    Args:
      tokens: every token's text.
      named: ids that the file's keys name as ends.
      fill_in: ids of `fill_in_ids`.
    """
    ids = _first_ids(tokens)
    found = [*named, *(ids[text] for text in END_TEXTS if text in ids)]
    found += [fill_in[kind] for kind in FILL_IN_ENDS if kind in fill_in]
    dropped = _not_ends({tokens[number] for number in found})
    return tuple(dict.fromkeys(n for n in found if tokens[n] not in dropped))


def fill_in_ids(tokens: Sequence[str], named: Mapping[str, int]) -> dict[str, int]:
    """Returns the tokens for filling in the middle, by their names in the keys.

    Args:
      tokens: every token's text.
      named: those that the file's keys name.
    """
    ids = _first_ids(tokens)
    found = {
        kind: ids[text]
        for kind, texts in FILL_IN_TEXTS.items()
        for text in reversed(texts)
        if text in ids
    }
    return found | dict(named)


def corrected_types(
    tokens: Sequence[str], fill_in: Mapping[str, int]
) -> dict[int, int]:
    """Returns the types of tokens that are taken for another type than the file's.

    Tokens of the lists above are CONTROL, so that a chat template's text becomes them
    and they are left out of answers. An <|end|> that ends no turn is shown.
    """
    ids = _first_ids(tokens)
    by_text = [ids[text] for text in END_TEXTS if text in ids]
    types = dict.fromkeys([*by_text, *fill_in.values()], CONTROL)
    shown = _not_ends({tokens[number] for number in types}) & {"<|end|>"} & ids.keys()
    return types | {ids[text]: USER_DEFINED for text in shown}


def _not_ends(texts: set[str]) -> set[str]:
    """Returns the texts that end nothing in a vocabulary whose ends are `texts`."""
    found = set()
    calls = bool({"<|call|>", "<|calls|>"} & texts)
    if calls and {"<|return|>", "<|flush|>"} & texts:
        found.add("<|end|>")  # closes a message of a turn that goes on
    if "<|tool_response>" in texts:
        found.add("</s>")  # plain text in Gemma 4
    return found


def _first_ids(tokens: Sequence[str]) -> dict[str, int]:
    """Returns the id of each text, the first where it is repeated."""
    return {token: number for number, token in reversed(list(enumerate(tokens)))}
