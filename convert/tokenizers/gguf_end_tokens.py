"""Finds the tokens of a GGUF file that end a generation, by the rules of llama.cpp.

Source: `llama_vocab::impl::load` in llama.cpp's `llama-vocab.cpp`. It uses the text of
a token and ignores its type in the file, which converters have often set wrongly.
"""

from collections.abc import Iterable, Mapping, Sequence

CONTROL, USER_DEFINED = 3, 4  # token types in GGUF files
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
# Tokens for filling in the middle of a text (fill-in-the-middle), by their roles, which
# are their names in the metadata. If the metadata does not name a token for a role, the
# first of these texts that is a token has the role.
FILL_IN_TEXTS = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
KNOWN = {*END_TEXTS, *(text for texts in FILL_IN_TEXTS.values() for text in texts)}
FILL_IN_ENDS = ("fim_pad", "fim_rep", "fim_sep")


def end_ids(
    tokens: Sequence[str], named: Iterable[int], fill_in: Mapping[str, int]
) -> tuple[int, ...]:
    """Returns the ids of all tokens that end a generation, those in `named` first.

    Args:
      tokens: text of every token.
      named: ids of the end tokens that the file's metadata names.
      fill_in: the result of `fill_in_ids`: role to token id.
    """
    ids = _first_ids(tokens)
    found = [*named, *(ids[text] for text in END_TEXTS if text in ids)]
    found += [fill_in[kind] for kind in FILL_IN_ENDS if kind in fill_in]
    dropped = _not_ends({tokens[number] for number in found})
    return tuple(dict.fromkeys(n for n in found if tokens[n] not in dropped))


def fill_in_ids(tokens: Sequence[str], named: Mapping[str, int]) -> dict[str, int]:
    """Returns the ids of the fill-in-the-middle tokens, by role, such as "fim_pre".

    Args:
      tokens: text of every token.
      named: ids of the fill-in-the-middle tokens that the file's metadata names. They
        take precedence over tokens found by their text.
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
    """Returns the token types that replace those in the file, by token id.

    End tokens and fill-in-the-middle tokens get the type CONTROL. Their text in a chat
    template is then encoded as the token, and they do not appear in answers. A token
    <|end|> that does not end a turn gets the type USER_DEFINED, so that it appears.

    Args:
      tokens: text of every token.
      fill_in: the result of `fill_in_ids`: role to token id.
    """
    ids = _first_ids(tokens)
    by_text = [ids[text] for text in END_TEXTS if text in ids]
    types = dict.fromkeys([*by_text, *fill_in.values()], CONTROL)
    shown = _not_ends({tokens[number] for number in types}) & {"<|end|>"} & ids.keys()
    return types | {ids[text]: USER_DEFINED for text in shown}


def _not_ends(texts: set[str]) -> set[str]:
    """Returns those of some end tokens' texts that do not end a turn, judging by the
    other end tokens of the vocabulary.

    Args:
      texts: the texts of all end tokens of the vocabulary.
    """
    found = set()
    calls = bool({"<|call|>", "<|calls|>"} & texts)
    if calls and {"<|return|>", "<|flush|>"} & texts:
        found.add("<|end|>")  # ends a message, but the turn continues
    if "<|tool_response>" in texts:
        found.add("</s>")  # plain text in Gemma 4
    return found


def _first_ids(tokens: Sequence[str]) -> dict[str, int]:
    """Returns the ids of the tokens whose text is in `KNOWN`, by text. If several
    tokens have the same text, it is the first one's id.

    Args:
      tokens: text of every token.
    """
    return {text: tokens.index(text) for text in KNOWN.intersection(tokens)}
