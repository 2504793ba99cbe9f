"""Builds the compiled CPU kernels, and the README as package indexes show it.

Without a compiler the package installs without kernels.
"""

import re
import sys
import tomllib
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


def long_description() -> str:
    """Returns the README with absolute links: package indexes do not host its files."""
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    repository = project["urls"]["Repository"]
    version = re.search(
        r'= "(.+)"', Path("stree_jax/common/version.py").read_text("utf-8")
    )

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1] == "!" else "blob"
        return f"{link[1]}[{link[2]}]({repository}/{kind}/v{version[1]}/{link[3]})"

    text = Path("README.md").read_text("utf-8")
    return re.sub(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)]+)\)", absolute, text)


setup(
    ext_modules=kernels(),
    long_description=long_description(),
    long_description_content_type="text/markdown",
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
