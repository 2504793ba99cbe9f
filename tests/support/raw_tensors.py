"""Stores one tensor of a safetensors file in any dtype, by the format's definition."""

import json
import math

import ml_dtypes
import numpy as np

# Bits of a number of each dtype of safetensors
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64, "BOOL": 8}
BITS |= {name: 8 for name in ("F8_E5M2", "F8_E4M3", "F8_E8M0", "U8", "I8")}
BITS |= {name: 16 for name in ("F16", "BF16", "I16", "U16")}
BITS |= {name: 32 for name in ("F32", "I32", "U32")}
BITS |= {name: 64 for name in ("F64", "I64", "U64")}
NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def read_raw(file):
    """Returns the header's entries and the bytes of each tensor, by name."""
    body = file.read_bytes()
    size = int.from_bytes(body[:8], "little")
    header, data = json.loads(body[8 : 8 + size]), body[8 + size :]
    header.pop("__metadata__", None)
    return {
        name: (v["dtype"], v["shape"], data[slice(*v["data_offsets"])])
        for name, v in header.items()
    }


def write_raw(file, tensors):
    """Writes tensors (dtype, shape, bytes) by name."""
    header, data = {}, b""
    for name, (dtype, shape, found) in tensors.items():
        ends = [len(data), len(data) + len(found)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": ends}
        data += found
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def retype(src, dst, name, dtype):
    """Copies a file with one tensor in another dtype: with its numbers if the dtype is
    in `NUMPY`, else with zeros."""
    tensors = read_raw(src)
    old, shape, found = tensors[name]
    stored = bytes(math.prod(shape) * BITS[dtype] // 8)
    if dtype in NUMPY:
        stored = np.frombuffer(found, NUMPY[old]).astype(NUMPY[dtype]).tobytes()
    write_raw(dst, tensors | {name: (dtype, shape, stored)})
