"""The compiled CPU kernels. Without a compiler the package installs without them."""

import sys
from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("cpu_kernels/src")
FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # one order and rounding of sums, however a loop is unrolled
    "-Wno-maybe-uninitialized",  # of GCC's own intrinsics
]


def kernels() -> list[Extension]:
    """Returns the library that `stree_jax.cpu_kernels` loads, if it can be built."""
    if sys.platform == "win32":  # written for GCC and Clang
        return []
    try:
        import jaxlib
    except ImportError:  # no headers
        return []
    extension = Extension(
        "stree_jax.cpu_kernels._native",
        sources=sorted(map(str, SOURCES.glob("*.cc"))),
        depends=sorted(map(str, SOURCES.glob("*.h"))),
        include_dirs=[str(Path(jaxlib.__file__).parent / "include")],
        extra_compile_args=FLAGS,
        language="c++",
        optional=True,
        py_limited_api=True,  # it uses nothing of Python's: one file for all versions
    )
    return [extension]


setup(ext_modules=kernels(), options={"bdist_wheel": {"py_limited_api": "cp311"}})
