"""Settings of all tests: CPU by default, and the strictest checks of JAX.

Compiling takes most of the suite's time. Programs are therefore compiled with little
optimisation, unless a test uses the fixture `optimised`. Each is compiled once per run:
other modules, workers and subprocesses load it from a cache. Set
JAX_COMPILATION_CACHE_DIR to keep the cache for the next run.
"""

import atexit
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# For torch, since workers share the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing is stored in the home directory
os.environ.setdefault("STREE_JAX_CACHE", "off")
# Other versions of XLA may abort on an unknown flag
if version("jaxlib").startswith("0.10."):
    # XLA:CPU's older compiler of fusions takes a third less time. Not splitting
    # programs over threads, which the other worker uses, saves a sixth.
    flags = "use_fusion_emitters=false", "parallel_codegen_split_count=1"
    os.environ.setdefault("XLA_FLAGS", " ".join(f"--xla_cpu_{flag}" for flag in flags))
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # the first process of a run
    PROGRAMS = tempfile.mkdtemp(prefix="stree-jax-programs-")
    atexit.register(shutil.rmtree, PROGRAMS, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = PROGRAMS
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
if os.environ["JAX_PLATFORMS"] == "cpu":  # on a GPU, with normal optimisation
    # An environment variable also applies to subprocesses.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
QUICK = jax.config.read("jax_disable_most_optimizations")

# No deadline, because an example's first run compiles. Every run has the same examples.
hypothesis.settings.register_profile(
    "stree", deadline=None, derandomize=True, max_examples=12, database=None
)
hypothesis.settings.load_profile("stree")

# The slowest files, 90 to 30 seconds on one core. They start first, so that no worker
# is left alone with one of them at the end.
LONGEST = [
    "convert/test_transformers.py",
    "bench/test_staged.py",
    "mesh/test_mesh.py",
    "sampling/test_sampling.py",
    "speculation/test_mtp.py",
    "speculation/test_staged_text.py",
    "bench/test_unrolled.py",
    "generation/test_x64.py",
    "convert/test_in_parts.py",
    "cpu_kernels/test_product.py",
    "speculation/test_lookup.py",
    "speculation/test_adaptive.py",
    "bench/test_bench.py",
    "bench/test_cost.py",
    "cli/test_main.py",
    "mesh/test_processes.py",
    "generation/test_rows.py",
    "speculation/test_seams.py",
    "test_int8.py",
    "bench/test_heads.py",
    "bench/test_budgets.py",
    "speculation/test_medusa.py",
    "sampling/test_heads.py",
]


def pytest_collection_modifyitems(config, items):
    """Puts the slowest files first. `--no-loadscope-reorder` makes xdist keep the
    order.

    Tests with a real model, with the files of peers or with a browser run only if
    selected.
    """
    for mark in {"real", "peers", "browser"} - set(config.option.markexpr.split()):
        for item in (item for item in items if item.get_closest_marker(mark)):
            item.add_marker(pytest.mark.skip(reason=f"`make test-{mark}` runs these"))
    places = {Path(__file__).parent / file: i for i, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))


@pytest.fixture
def optimised():
    """Compiles programs with normal optimisation, as for users.

    For tests that run longer than they compile, or that look at the program itself.
    """
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", QUICK)


MAPS = 20_000  # Linux allows 65,530; a module adds some thousands


def memory_maps():
    """Returns the number of memory maps of this process, or 0 if unknown."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


@pytest.fixture(scope="module", autouse=True)
def programs_of_one_module():
    """Drops compiled programs before a process runs out of memory maps.

    It does not do so after every module: the next would compile some 200 small programs
    again.
    """
    yield
    if memory_maps() > MAPS:
        jax.clear_caches()


@pytest.fixture(scope="module")
def nothing_measured(tmp_path_factory):
    """Makes sure that no measured step times are known."""
    from stree_jax.sizing import step_times

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STREE_JAX_CACHE", str(tmp_path_factory.mktemp("kept")))
        patch.setattr(step_times, "_known", {})
        yield
