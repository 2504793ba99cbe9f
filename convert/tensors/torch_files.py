"""Reads the tensors in files that PyTorch has written; other pickled objects are
refused."""

import warnings
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes  # the import also makes NumPy and safetensors support bfloat16
import numpy as np

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.base.files import check_fetched

PICKLED = (".bin", ".pt")  # endings of such files


def load_bin(file: Path) -> dict[str, Any]:
    """Returns the torch tensors of a file by name, mapped if possible.

    Raises:
      CheckpointError: torch is missing, or the file holds anything but tensors.
    """
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(
            f"{file}: reading {file.suffix} files needs torch; pip install torch, "
            "or convert the file to safetensors"
        ) from error
    try:
        zipped = zipfile.is_zipfile(file)  # torch before 1.6 wrote plain pickles
        options: dict[str, Any] = {"map_location": "cpu", "mmap": zipped}
        with warnings.catch_warnings(action="ignore"):  # warnings about unusual pickles
            loaded = torch.load(file, weights_only=True, **options)
    except Exception as error:  # a damaged pickle can raise anything
        check_fetched(file)
        reason = (str(error) or type(error).__name__).splitlines()[0]
        # torch's own message advises to run the code in the pickle.
        if reason.startswith("Weights only load failed"):
            reason = "it contains more than tensors, or it is damaged"
        raise CheckpointError(f"{file}: refused by torch.load ({reason})") from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(t, torch.Tensor)
        for name, t in loaded.items()
    ):
        raise CheckpointError(f"{file}: want a dictionary of named tensors")
    return loaded


def from_torch(tensor: Any) -> np.ndarray:
    """Returns a torch tensor as a NumPy array, without a copy if possible."""
    import torch

    tensor = tensor.detach().resolve_neg()
    if tensor.dtype == torch.bfloat16:
        bits = tensor.contiguous().view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    return tensor.numpy()
