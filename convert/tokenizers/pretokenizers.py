"""The pre-tokenizers of byte-level BPE vocabularies, by their names in GGUF files.

Sources: llama.cpp's `llama-vocab.cpp` (names), the tokenizer.json files that the names
stand for (expressions).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

# Regular expressions that split text into words before BPE, by names of pre-tokenizers.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = _SUFFIXES + r"\p{N}{1,3}" + _REST
QWEN2 = _SUFFIXES + r"\p{N}" + _REST
# Marks belong to words (the same in llama.cpp and transformers' Qwen3_5Tokenizer).
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{M}\p{N}]+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = (
    rf"[{case}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]"
    for case in (r"\p{Lu}\p{Lt}", r"\p{Ll}")
)
_SUFFIX, _FIRST = _SUFFIXES.partition("|[^")[0] + "?", r"[^\r\n\p{L}\p{N}]?"
KIMI_K2 = (  # Chinese characters are split from other letters
    rf"\p{{Han}}+|{_FIRST}{_UPPER}*{_LOWER}+{_SUFFIX}|{_FIRST}{_UPPER}+{_LOWER}*{_SUFFIX}|"
    r"\p{N}{1,3}" + _REST
)
DIGITS = (r"\p{N}", GPT2)
_THREE_DIGITS = r"[0-9][0-9][0-9]"
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", _THREE_DIGITS)
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, _THREE_DIGITS)
_EAST_ASIAN = "[\u0800-\u9fa5\uac00-\ud7ff]+"
# Letters with upper and lower case, without the scripts that the published list lacks.
_CASED = (
    r"\p{Lu}\p{Ll}\p{Lt}&&[^"
    "\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8f\u2d00-\u2d2f\ua790-\ua7ff\uab30-\uab6f"
    "\U00010570-\U000105bf\U00010d50-\U00010d8f\U00016e40-\U0001dfff]"
)
_MARKS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    rf"\s?[{_MARKS}]+",
    r"\s+$",
    _EAST_ASIAN,
    r"\p{N}+",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")
LLAMA3_LIKE = (
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "lfm2",
    "midm-2.0",
)
GPT2_LIKE = ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4")
PRETOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": DEFAULT,
    **dict.fromkeys((*GPT2_LIKE, "mpt", "olmo", "granite-docling"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), DIGITS),
    "falcon": FALCON,
    "deepseek-llm": DEEPSEEK_LLM,
    "deepseek-coder": DEEPSEEK_CODER,
    **dict.fromkeys((*LLAMA3_LIKE, "dbrx", "smaug-bpe"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (QWEN2,)),
    "qwen35": (QWEN35,),
    "tekken": (TEKKEN,),
    "kimi-k2": (KIMI_K2,),
}
# Pre-tokenizers where a word that is a token is not merged, and where a text begins
# with the BOS token unless the file says otherwise.
WHOLE_WORDS = {*LLAMA3_LIKE, "tekken"}
# Pre-tokenizers with NFC normalization; mpt and olmo use GPT-NeoX's tokenizer.
COMPOSED = {"qwen2", "qwen35", "deepseek-r1-qwen", "mpt", "olmo", "command-r"}


def pretokenizer(expressions: tuple[str, ...]) -> "PreTokenizer":
    """Returns a pre-tokenizer that splits text at each expression in turn, and then
    maps bytes to letters."""
    from tokenizers import Regex, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(e), "isolated") for e in expressions]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*cuts, letters])
