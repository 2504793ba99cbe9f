"""Compiled CPU kernels, built when the package is installed. They are optional.

`cpu_kernel` decorates a definition in JAX with the kernel that computes the same. The
other modules describe which arguments the larger kernels support. `src/` holds the C++;
`docs/explanation/cpu-kernels.md` explains when a kernel runs and how to disable it.

Public names are imported when they are first used, because most of them import jax. A
test compares the imports, which type checkers read, with the table.
"""

from typing import TYPE_CHECKING

from stree_jax.common.lazy import importer, modules_of

if TYPE_CHECKING:
    from stree_jax.cpu_kernels.delta import DeltaMemory as DeltaMemory
    from stree_jax.cpu_kernels.delta import DeltaWeights as DeltaWeights
    from stree_jax.cpu_kernels.delta import delta_outputs as delta_outputs
    from stree_jax.cpu_kernels.delta import delta_unsupported as delta_unsupported
    from stree_jax.cpu_kernels.experts import (
        experts_int8_unsupported as experts_int8_unsupported,
    )
    from stree_jax.cpu_kernels.experts import experts_unsupported as experts_unsupported
    from stree_jax.cpu_kernels.kernel import CpuKernel as CpuKernel
    from stree_jax.cpu_kernels.kernel import by_platform as by_platform
    from stree_jax.cpu_kernels.kernel import cpu_kernel as cpu_kernel
    from stree_jax.cpu_kernels.kernel import floats as floats
    from stree_jax.cpu_kernels.kernel import ints as ints
    from stree_jax.cpu_kernels.kernel import like as like
    from stree_jax.cpu_kernels.kernel import without_kernels as without_kernels
    from stree_jax.cpu_kernels.library import available as available
    from stree_jax.cpu_kernels.library import describe as describe
    from stree_jax.cpu_kernels.library import level as level
    from stree_jax.cpu_kernels.mixer import MixerMemory as MixerMemory
    from stree_jax.cpu_kernels.mixer import MixerTree as MixerTree
    from stree_jax.cpu_kernels.mixer import MixerWeights as MixerWeights
    from stree_jax.cpu_kernels.mixer import mixer_outputs as mixer_outputs
    from stree_jax.cpu_kernels.mixer import mixer_unsupported as mixer_unsupported
    from stree_jax.cpu_kernels.panels import panels_unsupported as panels_unsupported
    from stree_jax.cpu_kernels.product import int8_unsupported as int8_unsupported
    from stree_jax.cpu_kernels.product import product_unsupported as product_unsupported
    from stree_jax.cpu_kernels.selective import path_unsupported as path_unsupported
    from stree_jax.cpu_kernels.selective import (
        selective_unsupported as selective_unsupported,
    )
    from stree_jax.cpu_kernels.sizes import at_most as at_most
    from stree_jax.cpu_kernels.sizes import symbolic as symbolic
    from stree_jax.cpu_kernels.sizes import symbolic_size as symbolic_size
    from stree_jax.cpu_kernels.tokens import token_walk as token_walk

_NAMES = {
    "delta": "DeltaMemory DeltaWeights delta_outputs delta_unsupported",
    "experts": "experts_int8_unsupported experts_unsupported",
    "kernel": "CpuKernel by_platform cpu_kernel floats ints like without_kernels",
    "library": "available describe level",
    "mixer": "MixerMemory MixerTree MixerWeights mixer_outputs mixer_unsupported",
    "panels": "panels_unsupported",
    "product": "int8_unsupported product_unsupported",
    "selective": "path_unsupported selective_unsupported",
    "sizes": "at_most symbolic symbolic_size",
    "tokens": "token_walk",
}
_MODULE_OF = modules_of(_NAMES)

if not TYPE_CHECKING:  # type checkers would take every name for one that exists
    __getattr__ = importer(__name__, globals())
