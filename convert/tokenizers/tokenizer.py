"""Reads the tokenizer of a checkpoint, from files of a directory or from a GGUF
file."""

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.base.files import MAX_TOKENIZER_BYTES, read_text
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tensors.tensor_files import is_file, read_json
from stree_jax.convert.tokenizers.gguf_vocabulary import (
    has_vocabulary,
    read_vocabulary,
    settings,
)
from stree_jax.convert.tokenizers.in_parts import read_in_parts
from stree_jax.convert.tokenizers.mistral_words import set_mistral_words
from stree_jax.convert.tokenizers.piece_model import FILE as PIECES
from stree_jax.convert.tokenizers.piece_model import (
    is_bpe_model,
    is_piece_model,
    piece_id,
    read_piece_model,
)
from stree_jax.convert.tokenizers.prefix_space import SETTING as PREFIX_SPACE
from stree_jax.convert.tokenizers.prefix_space import with_prefix_space
from stree_jax.convert.tokenizers.rebuilt import disagreement, rebuilding_class
from stree_jax.convert.tokenizers.special_tokens import (
    ADDED,
    NAMES,
    SETTINGS,
    SPECIAL_MAP,
    add_special_tokens,
    read_special_tokens,
)
from stree_jax.convert.tokenizers.tekken import FILE as TEKKEN
from stree_jax.convert.tokenizers.tekken import read_tekken
from stree_jax.convert.tokenizers.vocab_files import (
    MERGES,
    VOCAB,
    class_of,
    read_vocab_files,
)
from stree_jax.convert.tokenizers.whole_texts import for_whole_texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
TEMPLATES = "additional_chat_templates"  # a folder of .jinja files
TOKENIZER_FILES = (
    TOKENIZER,
    SETTINGS,
    SPECIAL_MAP,
    ADDED,
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    VOCAB,
    MERGES,
)
# Files with a tokenizer in a format that this library may not be able to read.
OTHER_FORMS = (
    PIECES,
    TEKKEN,
    VOCAB,
    MERGES,
    "vocab.txt",
    "spiece.model",
    "tiktoken.model",
    "qwen.tiktoken",
)


def read_tokenizer(
    files: CheckpointFiles,
    warn: Callable[[str], object] | None = None,
    in_parts: bool = False,
) -> "Tokenizer | None":
    """Reads the tokenizer of a checkpoint. Returns None if it is absent or
    unsupported.

    The tokenizer encodes whole texts: saved truncation, padding and dropout are
    switched off. Special tokens from the files next to it are added.

    Args:
      files: the checkpoint.
      warn: called with one line if there is a tokenizer that cannot be read, or if
        transformers encodes texts differently.
      in_parts: if True, the tokenizer of a GGUF file is a `TokenizerInParts`, which
        does not take seconds to build.

    Raises:
      CheckpointError: a file of the tokenizer is malformed.
    """
    if files.is_gguf:
        return (read_in_parts if in_parts else read_vocabulary)(files.header, warn)
    fields, special = files.fields_if_any(SETTINGS), read_special_tokens(files)
    tokenizer: Tokenizer | None = None
    pieces = files.path / PIECES
    if files.has(TOKENIZER):
        as_saved = read_tokenizer_file(files.path / TOKENIZER)
        rebuilt = rebuilding_class(as_saved, files)
        tokenizer = with_prefix_space(as_saved, rebuilt, fields)
        add_special_tokens(tokenizer, special)
        if warn is not None and rebuilt:
            _warn_of_disagreement(tokenizer, files, rebuilt, warn)
    elif (name := class_of(files)) is not None:
        tokenizer = read_vocab_files(files, name, fields, special)
    elif files.has(PIECES) and is_piece_model(pieces):
        tokenizer = read_piece_model(pieces, fields, special)
    if tokenizer is None and files.has(TEKKEN):
        tokenizer = read_tekken(files.path / TEKKEN, special)
    if tokenizer is not None:
        set_mistral_words(tokenizer, files, fields)
        tokenizer.encode_special_tokens = fields.flag("split_special_tokens", False)
    elif warn is not None:
        _warn_of_other_forms(files.path, warn)
    return tokenizer


def read_tokenizer_file(file: Path) -> "Tokenizer":
    """Reads a tokenizer.json. The tokenizer encodes whole texts, see `read_tokenizer`.

    Raises:
      CheckpointError: the file is not a tokenizer.
    """
    return for_whole_texts(_as_saved(file))


def _as_saved(file: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(read_text(file, MAX_TOKENIZER_BYTES))
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # the Rust library raises plain Exception
        raise CheckpointError(f"{file}: not a tokenizer ({error})") from error


def has_tokenizer(files: CheckpointFiles) -> bool:
    """True if the checkpoint has a tokenizer of a supported kind.

    Does not build the tokenizer, which takes seconds for a large vocabulary. So it does
    not find every damage that `read_tokenizer` reports.
    """
    if files.is_gguf:
        return has_vocabulary(files.header)
    if (files.path / TOKENIZER).is_file() or class_of(files) is not None:
        return True
    pieces = files.path / PIECES
    if files.has(PIECES) and is_piece_model(pieces) and is_bpe_model(pieces):
        return True
    # Without this list, `read_tekken` returns None.
    return files.has(TEKKEN) and files.json(TEKKEN).get("special_tokens") is not None


def end_token(files: CheckpointFiles) -> int | None:
    """Returns the id of the tokenizer's `eos_token`, or None.

    The id may be outside the model's vocabulary.
    """
    names = token_names(files)
    if (text := names.get("eos_token")) is None or not has_tokenizer(files):
        return None
    if files.has(TOKENIZER):  # parsing JSON is much faster than building a tokenizer
        added = read_json(files.path / TOKENIZER).get("added_tokens")
        for entry in added if isinstance(added, list) else []:
            if isinstance(entry, dict) and entry.get("content") == text:
                return entry["id"] if type(entry.get("id")) is int else None
    found: Any = None
    if class_of(files) is not None:
        found = files.json(VOCAB).get(text)
    elif files.has(PIECES) and is_piece_model(files.path / PIECES):
        found = piece_id(files.path / PIECES, text)
    if type(found) is int:
        return found
    tokenizer = read_tokenizer(files)
    return None if tokenizer is None else tokenizer.token_to_id(text)


def end_of_text(files: CheckpointFiles) -> tuple[int, ...]:
    """Returns the id of GPT-NeoX's end-of-text token, if the tokenizer has it."""
    tokenizer = read_tokenizer(files)
    found = tokenizer and tokenizer.token_to_id("<|endoftext|>")
    return () if found is None else (found,)


def token_names(files: CheckpointFiles) -> dict[str, str]:
    """Returns the texts of the special tokens by role, such as "eos_token"."""
    if files.is_gguf:
        found = settings(files.header)
        return {name: found[name] for name in NAMES if name in found}
    return read_special_tokens(files).named


def _warn_of_disagreement(
    tokenizer: "Tokenizer",
    files: CheckpointFiles,
    name: str,
    warn: Callable[[str], object],
) -> None:
    """Warns if transformers does not use tokenizer.json as it is, and so gives other
    ids for some texts."""
    if text := disagreement(tokenizer, name, files.fields_if_any(SETTINGS)):
        warn(
            f"{files.path / TOKENIZER}: transformers 5 takes only the vocabulary from "
            f"this file, because of its class {name}, and encodes some texts "
            f"differently, such as {text!r}; stree-jax encodes them as the file says"
        )


def _warn_of_other_forms(directory: Path, warn: Callable[[str], object]) -> None:
    """Warns that there is a tokenizer in another format, and how to convert it."""
    found = [name for name in OTHER_FORMS if (directory / name).is_file()]
    if found:
        load = f"AutoTokenizer.from_pretrained({str(directory)!r})"
        warn(
            f"{directory}: has {' and '.join(found)} but no {TOKENIZER}, so the model "
            "takes only token ids, not text; create one with transformers: "
            f"{load}.save_pretrained({str(directory)!r})"
        )


def tokenizer_files_among(names: Collection[str]) -> list[str]:
    """Chooses the files of a repository that belong to its tokenizer and chat
    templates.

    Args:
      names: paths of all files, relative to the repository.
    """
    found = [name for name in TOKENIZER_FILES if name in names]
    if TOKENIZER not in names:
        found += [name for name in (PIECES, TEKKEN) if name in names]
    folder = f"{TEMPLATES}/"
    templates = [n for n in names if n.startswith(folder) and n.endswith(".jinja")]
    return found + sorted(templates)


def tokenizer_files(directory: Path) -> list[Path]:
    """Returns the existing files of a directory's tokenizer and chat templates.

    Raises:
      CheckpointError: one of them is not a regular file.
    """
    files = [directory / n for n in TOKENIZER_FILES if is_file(directory / n)]
    templates = sorted((directory / TEMPLATES).glob("*.jinja"))
    return files + [file for file in templates if is_file(file)]


def tokenizer_settings(files: CheckpointFiles) -> ConfigFields:
    """Returns the fields of tokenizer_config.json, or the same fields from a GGUF file.
    Empty if there are none."""
    if files.is_gguf:
        return ConfigFields(files.path, settings(files.header))
    return files.fields_if_any(SETTINGS)


def copy_tokenizer(src: CheckpointFiles, dst: Path) -> None:
    """Copies the files of a tokenizer, or writes equivalent files for a GGUF file.

    tokenizer.json is written without truncation, padding and dropout, and with the
    settings that depend on the model's family, because the copy may name another. If it
    is absent, it is created from the other files.
    """
    if src.is_gguf:
        if (tokenizer := read_tokenizer(src)) is not None:
            tokenizer.save(str(dst / TOKENIZER))
        own = {"tokenizer_class": "PreTrainedTokenizerFast"}
        own |= tokenizer_settings(src).values
        (dst / SETTINGS).write_text(json.dumps(own, indent=2) + "\n")
        return
    for file in tokenizer_files(src.path):
        copy = dst / file.relative_to(src.path)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    if (dst / TOKENIZER).exists():
        tokenizer = _as_saved(dst / TOKENIZER)
        fields = src.fields_if_any(SETTINGS)
        whole = for_whole_texts(tokenizer)
        name = rebuilding_class(whole, src)
        whole = with_prefix_space(whole, name, fields)
        if set_mistral_words(whole, src, fields) or whole is not tokenizer:
            whole.save(str(dst / TOKENIZER))
        if not name and PREFIX_SPACE in fields.values:  # it has no effect
            kept = {n: v for n, v in fields.values.items() if n != PREFIX_SPACE}
            (dst / SETTINGS).write_text(json.dumps(kept, indent=2) + "\n")
    elif (made := read_tokenizer(src)) is not None:
        made.save(str(dst / TOKENIZER))


@contextmanager
def encoding(name: str) -> Iterator[None]:
    """Converts errors of a tokenizer that cannot encode a text, for example because it
    has no unknown token.

    Args:
      name: description of the text, for the message.

    Raises:
      ValueError: instead of the plain Exception of the Rust library.
    """
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"{name}: the tokenizer cannot encode it ({error})") from error


def check_text_ids(
    name: str, tokenizer: "Tokenizer", ids: Iterable[int], num_tokens: int
) -> None:
    """Checks that the ids of an encoded text are in the model's vocabulary.

    Args:
      name: description of the text, for the message.
      tokenizer: the tokenizer.
      ids: the ids.
      num_tokens: size of the model's vocabulary.

    Raises:
      ValueError: an id is not in the vocabulary, for example that of a token that was
        added only to the tokenizer.
    """
    beyond = next((i for i in ids if i >= num_tokens), None)
    if beyond is not None:
        raise ValueError(
            f"{name}: contains the token {tokenizer.id_to_token(beyond)!r} (id "
            f"{beyond}), but the model has only the ids 0..{num_tokens - 1}; "
            "leave that token out, or use the tokenizer that the model was trained with"
        )
