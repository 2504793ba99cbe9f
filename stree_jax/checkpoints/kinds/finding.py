"""Functions that find the kind of drafter that a name stands for; `kinds.table` has one
for each kind. They read configs and headers only, and import no jax."""

import re
from pathlib import Path

from stree_jax.checkpoints.kinds.files import DrafterFiles
from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.drafters.fields import has_drafter_fields, is_assistant
from stree_jax.convert.drafters.plain_names import is_eagle
from stree_jax.convert.hub import hub_name
from stree_jax.convert.tensors.gguf_header import is_gguf

CUSTOM = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*(?:\.[^\W\d]\w*)*)")
HEADS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")  # files of Medusa heads


def is_custom(name: str) -> bool:
    """True if a drafter's name has the form MODULE:NAME of a custom drafter, and no
    file has this name."""
    return CUSTOM.fullmatch(name) is not None and not Path(name).exists()


def is_ngrams(files: DrafterFiles) -> bool:
    """True for a file that is not a model."""
    path = Path(files.name)
    if path.exists():
        return path.is_file() and not is_gguf(path)
    named = hub_name(files.name)
    return named is not None and (named.file or "").endswith(".safetensors")


def is_heads(files: DrafterFiles) -> bool:
    """True for Medusa heads."""
    fields = files.config_json
    return (
        not files.names.isdisjoint(HEADS)
        or fields.get("model_type") == "medusa"
        or "medusa_num_heads" in fields
    )


def is_published(files: DrafterFiles) -> bool:
    """True for the config of a published drafter."""
    return has_drafter_fields(files.config_json)


def is_assistant_drafter(files: DrafterFiles) -> bool:
    """True for the config of an assistant of Gemma 4."""
    return is_assistant(files.config_json)


def is_eagle_drafter(files: DrafterFiles) -> bool:
    """True for a drafter's config, or that of a model with one layer (EAGLE-2), and the
    tensors of EAGLE."""
    published = is_published(files)
    if not published and files.config_json.get("num_hidden_layers") != 1:
        return False
    try:
        return is_eagle(files.source.tensors)
    except CheckpointError:
        if published:
            raise
        return False  # loading it as a model then reports the fault
