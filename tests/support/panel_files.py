"""Random matrices in ggml's storage types."""

import gguf
import numpy as np

# Fields of a block that are float16 numbers, as (offset, count). "q3_k" and "q6_k" end
# in one.
HALVES = {
    "q4_0": (0, 1),
    "q4_1": (0, 2),
    "q5_0": (0, 1),
    "q5_1": (0, 2),
    "q8_0": (0, 1),
    "q3_k": (-2, 1),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (-2, 1),
    "iq4_nl": (0, 1),
    "iq4_xs": (0, 1),
}


def ggml_type(scheme: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[scheme.upper()]


def random_blocks(scheme: str, m: int, k: int, seed: int = 0) -> np.ndarray:
    """Returns the blocks of a matrix [m, k]: random bytes with small scales."""
    random = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[ggml_type(scheme)]
    blocks = random.integers(0, 256, (m, k // block, size)).astype(np.uint8)
    if scheme in HALVES:
        at, count = HALVES[scheme]
        at %= size
        scales = 0.01 * random.standard_normal((m, k // block, count))
        blocks[..., at : at + 2 * count] = scales.astype("<f2").view(np.uint8)
    elif scheme == "mxfp4":
        blocks[..., 0] = random.integers(118, 124, blocks.shape[:2])
    return blocks.reshape(m, -1)


def dequantized(scheme: str, blocks: np.ndarray) -> np.ndarray:
    """Decodes blocks with the `gguf` package."""
    return gguf.quants.dequantize(blocks, ggml_type(scheme))
