"""Settings of every test: CPU unless told otherwise, and JAX at its strictest.

Compiling takes most of the suite's time. So programs are compiled with little
optimisation, unless a test asks for `optimised`, and each is compiled once in a run:
what one module, worker or subprocess compiled, the others load. Set
JAX_COMPILATION_CACHE_DIR to keep them for the next run.
"""

import atexit
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch: the workers share the cores
os.environ.setdefault("STREE_JAX_CACHE", "off")  # nothing is kept in a home
if version("jaxlib").startswith("0.10."):  # a later XLA may not know the flag, and die
    # XLA:CPU's older way to compile fusions takes a third less time; a program that is
    # not cut for threads that the other worker has, a sixth less.
    flags = "use_fusion_emitters=false", "parallel_codegen_split_count=1"
    os.environ.setdefault("XLA_FLAGS", " ".join(f"--xla_cpu_{flag}" for flag in flags))
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # the first process of a run
    PROGRAMS = tempfile.mkdtemp(prefix="stree-jax-programs-")
    atexit.register(shutil.rmtree, PROGRAMS, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = PROGRAMS
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
if os.environ["JAX_PLATFORMS"] == "cpu":  # on a GPU, programs as users get them
    # In the environment, so that it holds for subprocesses too.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
QUICK = jax.config.read("jax_disable_most_optimizations")

# No deadline: an example's first run compiles. The same examples on every run.
hypothesis.settings.register_profile(
    "stree", deadline=None, derandomize=True, max_examples=12, database=None
)
hypothesis.settings.load_profile("stree")

# The files that take longest, in seconds of one core: 90 down to 30. They begin first,
# so that no worker is left with one of them when the other has nothing more to do.
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
    """The longest files first; `--no-loadscope-reorder` has xdist keep the order.

    Tests with a real model take minutes, and are run when they are asked for.
    """
    if "real" not in config.option.markexpr:
        for item in (item for item in items if item.get_closest_marker("real")):
            item.add_marker(pytest.mark.skip(reason="`make test-real` runs these"))
    places = {Path(__file__).parent / file: i for i, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))


@pytest.fixture
def optimised():
    """From here on a test's programs are compiled as users get them.

    For what runs longer than it compiles, and where the program itself is looked at.
    """
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", QUICK)


MAPS = 20_000  # of 65,530 that Linux allows; a module adds some thousands


def memory_maps():
    """How many this process has, 0 where it cannot be told."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


@pytest.fixture(scope="module", autouse=True)
def programs_of_one_module():
    """Drop compiled programs before they exhaust a process's memory maps.

    Not after every module: the small ones, some 200, the next would compile anew.
    """
    yield
    if memory_maps() > MAPS:
        jax.clear_caches()


@pytest.fixture(scope="module")
def nothing_measured(tmp_path_factory):
    """No step times are known, of this process or others."""
    from stree_jax.sizing import step_times

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STREE_JAX_CACHE", str(tmp_path_factory.mktemp("kept")))
        patch.setattr(step_times, "_known", {})
        yield
