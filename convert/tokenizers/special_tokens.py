"""Reads special and added tokens from the files next to tokenizer.json.

transformers reads them from tokenizer_config.json and, if that file has no
`added_tokens_decoder`, also from special_tokens_map.json and added_tokens.json. It adds
those that tokenizer.json does not list to the tokenizer. This module does the same.

Source: `_from_pretrained` in transformers' tokenization_utils_base.py and
`TokenizersBackend.__init__` in tokenization_utils_tokenizers.py (5.23).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stree_jax.convert.tensors.checkpoint_files import CONFIG, CheckpointFiles
from stree_jax.convert.tensors.fields import ConfigFields

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SETTINGS = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"
DECODER = "added_tokens_decoder"
NAMES = tuple(
    f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
EXTRA = ("extra_special_tokens", "additional_special_tokens")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_END = "<|endoftext|>"
_ENDS = {"bos_token": _END, "eos_token": _END, "unk_token": _END}
_QWEN_ENDS = {"eos_token": _END, "unk_token": _END, "pad_token": _END}
_GEMMA = {f"{role}_token": f"<{role}>" for role in ("unk", "bos", "eos", "pad", "mask")}
_CODE_LLAMA = {
    **{"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    **{"prefix_token": "\u2581<PRE>", "middle_token": "\u2581<MID>"},
    **{"suffix_token": "\u2581<SUF>", "eot_token": "\u2581<EOT>"},
    "fill_token": "<FILL_ME>",
}
# Defaults of transformers' tokenizer classes for special tokens.
CLASS_ROLES = {
    "GPT2Tokenizer": _ENDS,
    "GPTNeoXTokenizer": _ENDS | {"pad_token": "<|padding|>"},
    "Qwen2Tokenizer": _QWEN_ENDS,
    "Qwen3_5Tokenizer": _QWEN_ENDS,
    "GemmaTokenizer": _GEMMA,
    "CodeLlamaTokenizer": _CODE_LLAMA,
}
GENERIC = "TokenizersBackend"  # transformers' class that uses tokenizer.json as it is
# Tokenizer classes of families (`TOKENIZER_MAPPING_NAMES` in tokenization_auto.py).
FAMILY_CLASSES = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer"),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        "Qwen3_5Tokenizer",
    ),
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared"), GENERIC),
    **dict.fromkeys(("granitemoehybrid", "jamba", "kimi_linear"), GENERIC),
    **dict.fromkeys(("mistral", "mistral3", "ministral3"), GENERIC),
    **dict.fromkeys(("olmo2", "olmo3", "olmo_hybrid"), GENERIC),
}
# Families whose class counts more than the one in tokenizer_config.json
# (`MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS`).
OVERRULED = ("jamba", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")


@dataclass
class Token:
    """A token as `tokenizers.AddedToken`, without that package.

    Attributes:
      content: its text.
      special: True if it is a special token.
      flags: values of the other `FLAGS`.
    """

    content: str
    special: bool
    flags: dict[str, bool]


@dataclass(frozen=True)
class SpecialTokens:
    """Tokens from the files next to tokenizer.json.

    Attributes:
      named: text of the token for each role, such as "eos_token".
      listed: tokens with an id in the files, ordered by id.
      further: special tokens with a role, and extra ones; they may be missing from
        `listed`.
    """

    named: dict[str, str]
    listed: tuple[Token, ...] = ()
    further: tuple[Token, ...] = ()


def tokenizer_class(files: CheckpointFiles) -> str:
    """Returns the name of transformers' tokenizer class, without "Fast".

    It follows from tokenizer_config.json and the model's family. Returns an empty
    string if the class is unknown or generic.
    """
    config = files.json() if files.has(CONFIG) else {}
    family = str(config.get("model_type"))
    usual = FAMILY_CLASSES.get(family, "")
    named = files.fields_if_any(SETTINGS).values.get("tokenizer_class")
    if not named and files.has("tokenizer.json"):
        named = config.get("tokenizer_class")
    name = named.removesuffix("Fast") if isinstance(named, str) else ""
    if not name or (family in OVERRULED and files.has("tokenizer.json")):
        name = usual
    elif usual == GENERIC and files.has("tokenizer.json"):
        return ""
    return "" if name == GENERIC else name


def read_special_tokens(files: CheckpointFiles) -> SpecialTokens:
    """Reads the special and added tokens of a directory.

    Raises:
      CheckpointError: a file or an entry is malformed.
    """
    settings = files.fields_if_any(SETTINGS)
    older = [files.fields(SPECIAL_MAP)] if files.has(SPECIAL_MAP) else []
    # special_tokens_map.json takes precedence, unless tokenizer_config.json has a list
    # of tokens: then it only adds roles that tokenizer_config.json lacks.
    newer = DECODER in settings.values
    sources = [settings] if newer else [*older, settings]
    roles = _class_roles(files, settings) | _roles(sources)
    order = dict.fromkeys([*NAMES, *roles])  # new tokens get ids in this order
    special = [roles[n] for n in order if n in roles] + _extra(sources)
    if newer:
        listed = _decoder(settings)
        roles = _roles(older) | roles
    else:
        listed = _added_file(files, {token.content for token in special})
    named = {name: token.content for name, token in roles.items()}
    for token in listed:
        token.special = token.special or token.content in named.values()
    return SpecialTokens(named, tuple(listed), tuple(special))


def add_special_tokens(tokenizer: "Tokenizer", tokens: SpecialTokens) -> None:
    """Adds those tokens to the tokenizer that it lacks, as transformers does."""
    known = {t.content for t in tokenizer.get_added_tokens_decoder().values()}
    known |= {token.content for token in tokens.listed}
    new = {t.content: t for t in tokens.further if t.content and t.content not in known}
    if added := [*tokens.listed, *new.values()]:
        from tokenizers import AddedToken

        tokenizer.add_tokens(
            [AddedToken(t.content, special=t.special, **t.flags) for t in added]
        )


def _class_roles(files: CheckpointFiles, settings: ConfigFields) -> dict[str, Token]:
    """Returns the class's default tokens for roles that are missing in the settings."""
    texts = CLASS_ROLES.get(tokenizer_class(files), {})
    left_out = {n: text for n, text in texts.items() if n not in settings.values}
    return {name: _token(settings, name, text) for name, text in left_out.items()}


def _roles(sources: list[ConfigFields]) -> dict[str, Token]:
    """Returns tokens by role. If several sources have a role, the first one counts."""
    found: dict[str, Token] = {}
    for source in reversed(sources):
        own = {n: v for n, v in source.values.items() if n in NAMES and v is not None}
        for name, value in source.values.items():  # roles that only this model has
            if name.endswith("_token") and isinstance(value, str):
                own[name] = value
        for extra in EXTRA:
            if isinstance(values := source.values.get(extra), dict):
                own |= values
        found |= {name: _token(source, name, value) for name, value in own.items()}
    return found


def _extra(sources: list[ConfigFields]) -> list[Token]:
    """Returns the special tokens that have no role."""
    for source in sources:
        for name in EXTRA:
            value = source.values.get(name)
            if value is None or isinstance(
                value, dict
            ):  # tokens in an object have roles
                continue
            if not isinstance(value, list):
                raise source.wants(name, "a list of tokens", value)
            if value:
                return [_token(source, name, token) for token in value]
    return []


def _decoder(settings: ConfigFields) -> list[Token]:
    """Returns the tokens of `added_tokens_decoder`, an object with ids as keys."""
    values = settings.object(DECODER).values
    try:
        ids = sorted(values, key=int)
    except ValueError as error:
        raise settings.error(DECODER, f"want ids as keys ({error})") from error
    return [_token(settings, f"{DECODER}.{i}", values[i], special=False) for i in ids]


def _added_file(files: CheckpointFiles, special: set[str]) -> list[Token]:
    """Returns the tokens of added_tokens.json, an object with tokens as keys."""
    fields = files.fields_if_any(ADDED)
    ids = {name: fields.size(name, low=0) for name in fields.values}
    if odd := [name for name in ids if not _is_utf8(name)]:
        raise fields.error(ascii(odd[0]), "not UTF-8 text")
    return [
        Token(name, name in special, {"normalized": name not in special})
        for name in sorted(ids, key=ids.__getitem__)
    ]


def _token(fields: ConfigFields, name: str, value: Any, special: bool = True) -> Token:
    """Parses a token that is given as its text, or as an object with "content"."""
    text = token_text(value)
    if not isinstance(text, str) or not _is_utf8(text):
        raise fields.wants(name, 'a string or {"content": string}', value)
    if isinstance(value, str):
        return Token(value, special, {"normalized": not special})
    flags = {flag: value[flag] for flag in FLAGS if value.get(flag) is not None}
    odd = [flag for flag in flags if not isinstance(flags[flag], bool)]
    if odd:
        raise fields.wants(f"{name}.{odd[0]}", "true or false", flags[odd[0]])
    special = flags.pop("special", special)
    return Token(text, special, {"normalized": not special} | flags)


def token_text(value: Any) -> Any:
    """Returns the text of a token that is given as a text, or as an object."""
    return value.get("content") if isinstance(value, dict) else value


def _is_utf8(text: str) -> bool:
    """True unless the text has lone surrogates, which JSON can represent."""
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)
