"""Finds which tensors of a checkpoint are quantized, by its config files.

The result is a `Tensors` that lists the dequantized matrices, so that other code can
read it like any other source. `dequantize.py` and `int4.py` define the quantization
schemes, and `quantization_config.py` says which module has which scheme.
"""

from collections.abc import Mapping
from dataclasses import replace

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.dequantize import BLOCKS, FLOATS, SCALES, Part, Scheme
from stree_jax.convert.tensors.quantization_config import (
    CONFIG,
    RECIPE_FILES,
    WEIGHTS,
    read_recipe,
)
from stree_jax.convert.tensors.recipe import Recipe
from stree_jax.convert.tensors.stored_tensors import PackedInfo, TensorInfo, Tensors
from stree_jax.convert.tensors.torch_files import PICKLED

# Scales of activations and KV caches, which are ignored: both stay in the model's
# dtype.
ACTIVATIONS = frozenset(
    "input_scale input_global_scale input_zero_point output_scale output_zero_point "
    "activation_scale q_scale k_scale v_scale k_zero_point v_zero_point".split()
)


def logical(source: Tensors, files: CheckpointFiles) -> Tensors:
    """Returns the source with a float tensor in place of each quantized one.

    If no config file mentions quantization, the source is unchanged. Only headers are
    read, and biases that may have been added to the model.

    Args:
      source: the tensors as stored.
      files: the checkpoint.

    Raises:
      CheckpointError: the quantization method is unknown, or a quantized tensor does
        not fit the config or its shape.
    """
    recipe = read_recipe(source, files)
    stored = source.tensors
    if recipe is None:
        _check_plain(source)
        return source
    if pickled := [t.file for t in stored.values() if t.file.suffix in PICKLED]:
        raise CheckpointError(
            f"{pickled[0]}: quantized weights are read from safetensors files only"
        )
    quantized: dict[str, PackedInfo] = {}
    for name, info in stored.items():
        module, word = _split(name)
        if word not in WEIGHTS or (word == "weight" and info.dtype in FLOATS):
            continue
        found = _quantized(recipe, stored, module, name)
        matrix = module if word == BLOCKS else f"{module}.weight"
        if quantized.setdefault(matrix, found) is not found:
            raise CheckpointError(f"{info.file}: {name}: {module} has two weights")
    if recipe.has_schemes() and not quantized:
        raise CheckpointError(
            f"{recipe.file}: declares quantized weights, but no tensor is quantized"
        )
    used = {name for q in quantized.values() for name, _ in q.parts.values()}
    used |= _zero_biases(source, quantized)
    tensors = {
        name: info
        for name, info in stored.items()
        if name not in used and name.rpartition(".")[2] not in ACTIVATIONS
    }
    if both := tensors.keys() & quantized.keys():
        name = min(both)
        raise CheckpointError(f"{tensors[name].file}: {name}: occurs twice")
    for name, q in quantized.items():
        info = q.parts["weight"][1]
        tensors[name] = TensorInfo(info.file, q.scheme.matrix(info.shape), "bfloat16")
    return replace(source, tensors=tensors, quantized=quantized)


def _check_plain(source: Tensors) -> None:
    """Raises CheckpointError if there are tensors of a quantizer, but no recipe."""
    words = WEIGHTS - {"weight"}
    name = next((n for n in source.tensors if _split(n)[1] in words), None)
    if name is not None:
        files = ", ".join(RECIPE_FILES)
        raise CheckpointError(
            f"{source.tensors[name].file}: {name}: is quantized, but config.json has "
            f"no {CONFIG}; copy the quantizer's own file next to it ({files})"
        )


def _split(name: str) -> tuple[str, str]:
    """Splits a tensor's name into the name of the module, or of the parameter of
    gpt-oss, and the ending that `Scheme.endings` lists."""
    if name.endswith(BLOCKS):
        return name.removesuffix(BLOCKS), BLOCKS
    module, _, word = name.rpartition(".")
    return module, word


def _joined(module: str, word: str) -> str:
    """Returns a tensor's name: the inverse of `_split`, for scales too."""
    return module + word if word in (BLOCKS, SCALES) else f"{module}.{word}"


def scheme_names(source: Tensors) -> str | None:
    """Returns the schemes of a source's weights, such as "nvfp4", "fp8+nvfp4" or
    "q4_k". None if all weights are plain floats."""
    names = {source.scheme(name) for name in source.tensors} - {None}
    return "+".join(sorted(filter(None, names))) or None


def _quantized(
    recipe: Recipe, stored: Mapping[str, TensorInfo], module: str, name: str
) -> PackedInfo:
    """Finds the stored tensors of a quantized matrix, by the scheme that fits them.

    Raises:
      CheckpointError: they fit no scheme; the message is about the first one.
    """
    info = stored[name]
    where = f"{info.file}: {name}"
    if recipe.ignored.has(module):
        raise CheckpointError(
            f"{where}: is {info.dtype}, but {recipe.file.name} says it is not quantized"
        )
    fits, problems = list[PackedInfo](), list[CheckpointError]()
    for scheme in recipe.schemes(module):
        try:
            fits.append(_parts(recipe, scheme, stored, module, name))
        except CheckpointError as error:
            problems.append(error)
    if fits:  # a scheme with zero points also fits the same matrix without them
        return max(fits, key=lambda found: len(found.parts))
    if problems:
        raise problems[0]
    raise CheckpointError(f"{where}: no scheme for it in {recipe.file.name}")


def _parts(
    recipe: Recipe,
    scheme: Scheme,
    stored: Mapping[str, TensorInfo],
    module: str,
    name: str,
) -> PackedInfo:
    """Finds the stored tensors of a matrix in a scheme, and checks their names, dtypes
    and shapes."""
    info = stored[name]
    where = f"{info.file}: {name}"
    if (name, info.dtype) != (_joined(module, scheme.weight), scheme.stored):
        raise CheckpointError(
            f"{where}: want {scheme.weight} of dtype {scheme.stored} "
            f"({scheme.name} by {recipe.file.name}), got dtype {info.dtype}"
        )
    if len(info.shape) != scheme.rank or 0 in info.shape:
        wanted = "a matrix" if scheme.rank == 2 else f"{scheme.rank} axes"
        raise CheckpointError(
            f"{where}: quantized shape {list(info.shape)}, want {wanted}"
        )
    matrix = scheme.matrix(info.shape)
    rows, columns = scheme.block
    if scheme.whole_groups and rows == 1 and columns and matrix[-1] % columns:
        raise CheckpointError(
            f"{where}: {matrix[-1]} columns are not whole groups of {columns}"
        )
    shapes = scheme.shapes(matrix)
    parts: dict[Part, tuple[str, TensorInfo]] = {}
    for part, word in scheme.endings().items():
        tensor = _joined(module, word)
        if tensor not in stored and part in scheme.optional:
            continue
        if tensor not in stored:
            raise CheckpointError(f"{where}: {tensor} is missing")
        parts[part] = tensor, stored[tensor]
        if part != "weight":
            _check_part(scheme, part, shapes[part], tensor, stored[tensor])
    return PackedInfo(scheme, parts)


def _zero_biases(source: Tensors, quantized: Mapping[str, PackedInfo]) -> set[str]:
    """Returns the biases that a quantizer has added to the modules of a model.

    AutoGPTQ writes a bias for every module: zeros if the module has none. A module
    counts as such if all modules of its name, such as "q_proj", have only zeros.
    """
    biases: dict[str, list[str]] = {}
    for name, q in quantized.items():
        bias = name.removesuffix("weight") + "bias"
        if q.scheme.adds_biases and bias in source.tensors:
            biases.setdefault(bias.split(".")[-2], []).append(bias)
    return {
        bias
        for names in biases.values()
        if not any(source.read(name).any() for name in names)
        for bias in names
    }


def _check_part(
    scheme: Scheme,
    part: Part,
    shapes: set[tuple[int, ...]],
    name: str,
    info: TensorInfo,
) -> None:
    """Checks the dtype and shape of a tensor that belongs to a quantized matrix."""
    dtypes = scheme.dtypes(part)
    if info.dtype not in dtypes:
        wanted = " or ".join(dtypes)
        raise CheckpointError(
            f"{info.file}: {name}: want dtype {wanted}, got {info.dtype}"
        )
    if info.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in sorted(shapes, key=len))
        raise CheckpointError(
            f"{info.file}: {name}: want shape {wanted}, got {list(info.shape)}"
        )
