"""Compiled CPU kernels, built when the package is installed. They are optional.

`cpu_kernel` decorates a definition in JAX with the kernel that computes the same. The
other modules describe which arguments the larger kernels support. `src/` holds the C++;
`docs/explanation/cpu-kernels.md` explains when a kernel runs and how to disable it.
"""

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
