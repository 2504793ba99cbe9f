"""Names of the tensors of block drafters, and their reading."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.drafters.fields import Fields
from stree_jax.convert.drafters.kept import can_be_kept, kept
from stree_jax.convert.drafters.plain_names import (
    ATTENTION,
    LAYER,
    MASK,
    MLP,
    plain_name,
)
from stree_jax.convert.families.tensors import check_dtype
from stree_jax.convert.tensors.stored_tensors import Tensors
from stree_jax.models import nest, stored
from stree_jax.models.configs.params import Path as ParamPath
from stree_jax.models.drafters.dflash import (
    DFlash,
    DFlashConfig,
    dflash_table,
    half_split_order,
)
from stree_jax.models.weights.format import QUANTIZED, Format

EMBEDDING, HEAD, IDS, USED = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
# Tensors of the pair scores and of the confidence head, by the name of our parameter
MARKOV = {
    "previous": "markov_head.markov_w1.weight",
    "following": "markov_head.markov_w2.weight",
    "gate": "markov_head.gate_proj.weight",
    "gate_bias": "markov_head.gate_proj.bias",
    "joint": "markov_head.joint_proj.weight",
    "joint_bias": "markov_head.joint_proj.bias",
}
SELECTOR = {
    "previous": "candidate_selector.predecessor_codebook",
    "following": "candidate_selector.successor_codebook",
    "projection": "candidate_selector.hidden_projection.weight",
}
CONFIDENCE = {
    "weight": "confidence_head.proj.weight",
    "bias": "confidence_head.proj.bias",
}
FREQUENCIES = "rotary_emb.inv_freq"  # ending of tensors that follow from the config
# Tensors that only training uses
UNREAD = ("verifier_lm_head.weight", "verifier_norm.weight")
# Tensors that are not parameters
UNUSED = (IDS, USED, MASK, *UNREAD)
# The tensors of integers and flags, which say which token each row of the head is, and
# patterns of their allowed dtypes as safetensors and torch name them
DISCRETE = {
    IDS: re.compile(r"[IU]\d+|u?int\d+"),
    USED: re.compile(r"[IU]\d+|u?int\d+|BOOL|bool"),
}


def tensor_names(c: DFlashConfig) -> dict[ParamPath, tuple[str, ...]]:
    """Returns the plain names (`plain_name`) of the tensors that each parameter
    consists of, by the path of the parameter.

    If there are several tensors, they are concatenated along the first axis. The
    exception is "head", which has several possible names in order of preference.
    """
    tied = c.own_embedding and c.head_rows == c.vocab_size
    named: dict[ParamPath, tuple[str, ...]] = {
        ("fc",): ("fc.weight",),
        ("context_norm",): ("hidden_norm.weight",),
        ("norm",): ("norm.weight",),
        ("embedding",): (EMBEDDING,),
        ("head",): (HEAD, EMBEDDING) if tied else (HEAD,),
    }
    for i in range(len(c.layers)):
        part, own, mlp = (name.format(i=i) for name in (LAYER, ATTENTION, MLP))
        for name, tensors in {
            "norm": (f"{part}input_layernorm.weight",),
            "mlp_norm": (f"{part}post_attention_layernorm.weight",),
            "q": (f"{own}q_proj.weight",),
            "kv": (f"{own}k_proj.weight", f"{own}v_proj.weight"),
            "out": (f"{own}o_proj.weight",),
            "q_norm": (f"{own}q_norm.weight",),
            "k_norm": (f"{own}k_norm.weight",),
            "sinks": (f"{own}attention_sink_bias",),
            "gate_up": (f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"),
            "down": (f"{mlp}down_proj.weight",),
            "attention_conv_base": (f"{part}attention_conv.base_kernel",),
            "mlp_conv_base": (f"{part}mlp_conv.base_kernel",),
            "attention_conv_projection": (
                f"{part}attention_conv.kernel_projection.weight",
            ),
            "mlp_conv_projection": (f"{part}mlp_conv.kernel_projection.weight",),
        }.items():
            named[f"layers_{i}", name] = tensors
    pairs = SELECTOR if c.pairs == "selector" else MARKOV
    named |= {("pairs", name): (tensor,) for name, tensor in pairs.items()}
    named |= {("confidence", name): (t,) for name, t in CONFIDENCE.items()}
    return {path: named[path] for path in dflash_table(c)}


def _present(
    path: ParamPath, names: tuple[str, ...], found: Mapping[str, Any]
) -> tuple[str, ...]:
    """Returns those of a parameter's plain names that the file uses.

    Only "head" has alternatives: the first name that the file has. For a tied head this
    may be the name of the embedding.

    Args:
      path: path of the parameter.
      names: its names by `tensor_names`.
      found: a dictionary whose keys are the plain names of the file's tensors.
    """
    if path != ("head",):
        return names
    return (next((name for name in names if name in found), names[0]),)


def check_shapes(f: Fields, c: DFlashConfig) -> None:
    """Raises CheckpointError if a tensor is missing, unexpected or of another shape."""
    table, expected = dflash_table(c), set(UNUSED)
    for path, names in tensor_names(c).items():
        names = _present(path, names, f.shapes)
        want = table[path].shape
        if path == ("confidence", "bias") and names[0] not in f.shapes:
            continue  # it is zero
        shapes = [f.shape(name, len(want)) for name in names]
        expected |= set(names)
        found = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        if found != want or len({shape[1:] for shape in shapes}) > 1:
            raise f.error(
                f"{' + '.join(names)}: want shape {list(want)} by {f.whole.file.name}, "
                f"got {list(found)}"
            )
    for name in sorted(f.shapes.keys() - expected):
        if not name.endswith(FREQUENCIES):
            raise f.error(f"unexpected tensor {name}")


def check_stored(source: Tensors, plain: Callable[[str], str]) -> None:
    """Checks the dtypes and names of a drafter's tensors, from headers.

    Args:
      source: the tensors.
      plain: returns the name that most publishers give to a tensor.

    Raises:
      CheckpointError: a tensor has a dtype that is not read, or two are one parameter.
    """
    first: dict[str, str] = {}
    for name, info in source.tensors.items():
        known = plain(name)
        if (other := first.setdefault(known, name)) != name:
            raise CheckpointError(
                f"{info.file}: {name} and {other} are one parameter, twice"
            )
        if known in DISCRETE:
            if not DISCRETE[known].fullmatch(info.dtype):
                raise CheckpointError(
                    f"{info.file}: {name}: dtype {info.dtype} is not supported (want "
                    "integers)"
                )
        elif known not in UNREAD and not name.endswith(FREQUENCIES):
            check_dtype(name, info)


def read_dflash(
    source: Tensors, c: DFlashConfig, format: Format, interleaved: bool = False
) -> DFlash:
    """Reads a block drafter's weights.

    Args:
      source: the tensors.
      c: the architecture, as `dflash_config` reads it. Embeddings and heads that it
        does not have are not read.
      format: format of the weights.
      interleaved: True if the rotary embedding of the files rotates pairs of
        neighbouring channels. Rows are then permuted, so that halves rotate.

    Raises:
      CheckpointError: a tensor cannot be read, or the tokens of the head's rows are
        inconsistent.
    """
    files = {plain_name(name): name for name in source.tensors}
    ids, order = _head_ids(source, files, c)
    table, sources = dflash_table(c), _sources(files, c)
    packed = kept_sources(source, c, interleaved)
    turned = c.attention.rope.dim if interleaved and c.attention.rope else 0
    params: dict[ParamPath, Any] = {}
    for path, param in table.items():
        tensors = sources[path]
        own = order if path in {("head",), ("pairs", "following")} else None
        if path == ("confidence", "bias") and not tensors:
            params[path] = stored(param, jnp.zeros(param.shape), format)
            continue
        if path in packed and can_be_kept(source, param, tensors, format):
            params[path] = kept(source, tensors, format, own)
            continue
        whole = _whole(source, path, tensors, _read_dtype(format), c, turned)
        if own is not None:
            whole = whole[own]
        if path == ("embedding",) and MASK in files:
            mask = source.read(files[MASK]).reshape(-1)
            whole = np.array(whole)
            whole[c.mask_token] = mask
        params[path] = stored(param, jnp.asarray(whole), format)
    return DFlash(nest(params), c, ids)


def _read_dtype(format: Format) -> np.dtype:
    """Returns the dtype to which quantized tensors are dequantized, if they are not
    kept as they are in the file."""
    return format.source_dtype(QUANTIZED, ())


def _sources(files: Mapping[str, str], c: DFlashConfig) -> dict[ParamPath, list[str]]:
    """Returns the stored tensors of each parameter. The bias of a confidence head may
    be missing."""
    return {
        path: [files[n] for n in _present(path, names, files) if n in files]
        for path, names in tensor_names(c).items()
    }


def kept_sources(
    source: Tensors, c: DFlashConfig, interleaved: bool
) -> dict[ParamPath, list[str]]:
    """Returns the stored tensors of the parameters that are read without a change other
    than the order of the head's rows; see `read_dflash` for the arguments."""
    files = {plain_name(name): name for name in source.tensors}
    found = _sources(files, c)
    changed = ["embedding"] if MASK in files else []
    if interleaved:
        changed += ["q", "kv"]
    return {path: tensors for path, tensors in found.items() if path[-1] not in changed}


def _whole(
    source: Tensors,
    path: ParamPath,
    tensors: Sequence[str],
    dtype: np.dtype,
    c: DFlashConfig,
    turned: int,
) -> np.ndarray:
    """Reads a parameter as an array.

    Args:
      source: the tensors.
      path: the parameter.
      tensors: names of its tensors, whose rows are stacked.
      dtype: dtype of quantized tensors.
      c: the architecture.
      turned: channels of a head that rotate in pairs of neighbours, or 0.
    """
    parts = []
    for name in tensors:
        part = source.read(name, dtype)
        if turned and re.search(r"\.[qk]_(proj|norm)\.", name):
            part = _half_split(part, c.attention.head_dim, turned)
        parts.append(part)
    if len({part.dtype for part in parts}) > 1:  # NumPy does not promote all pairs
        parts = [part.astype(np.float32) for part in parts]
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _half_split(x: np.ndarray, head_dim: int, dim: int) -> np.ndarray:
    """Reorders the channels of heads [heads * head_dim, ..] whose first `dim` channels
    rotate in pairs of neighbours, so that channel i rotates with i + dim / 2."""
    order = half_split_order(head_dim, dim)
    return x.reshape(-1, head_dim, *x.shape[1:])[:, order].reshape(x.shape)


def _head_ids(
    source: Tensors, files: Mapping[str, str], c: DFlashConfig
) -> tuple[Any, np.ndarray | None]:
    """Returns the token of each row of a trimmed head, in ascending order, and the
    order [D] that sorts the file's rows in this way. (None, None) if the head has a row
    for every token."""
    if not 0 < c.head_rows < c.vocab_size:
        return None, None
    arrays = {n: source.read(files[n]) for n in (IDS, USED) if n in files}
    ids = head_ids(arrays, c.head_rows, c.vocab_size, source.directory)
    order = np.argsort(ids)
    return jnp.asarray(ids[order], jnp.int32), order


def head_ids(
    arrays: Mapping[str, np.ndarray], rows: int, vocab: int, where: Path
) -> np.ndarray:
    """Returns the token of each row of a trimmed head: [D] int64. Files store the
    difference between the token and the index of the row.

    Args:
      arrays: the tensors `d2t` (the differences) and, if the file has it, `t2d` (flags
        of the vocabulary's tokens that have a row).
      rows: D, the number of rows.
      vocab: number of tokens of the vocabulary.
      where: the checkpoint's path, for messages.

    Raises:
      CheckpointError: a token occurs twice or is not in the vocabulary, or `t2d` marks
        other tokens.
    """
    offsets = arrays[IDS]
    if offsets.shape != (rows,) or offsets.dtype.kind not in "iu":
        raise CheckpointError(f"{where}: {IDS}: want {rows} integers")
    ids = np.arange(rows) + offsets.astype(np.int64)
    if len(set(ids.tolist())) < rows or not 0 <= ids.min() <= ids.max() < vocab:
        raise CheckpointError(
            f"{where}: {IDS}: want {rows} different tokens, as differences from the "
            "number of the row"
        )
    if USED in arrays and not np.array_equal(
        np.flatnonzero(arrays[USED]), np.sort(ids)
    ):
        raise CheckpointError(f"{where}: {USED} and {IDS} are of different tokens")
    return ids
