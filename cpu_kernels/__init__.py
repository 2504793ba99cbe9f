"""Compiled CPU kernels, built when the package is installed. They are optional.

`cpu_kernel` decorates a definition in JAX with the kernel that computes the same. The
other modules describe which arguments the larger kernels support. `src/` holds the C++;
`docs/explanation/cpu-kernels.md` explains when a kernel runs and how to disable it.

Public names are imported when they are first used, because most of them import jax.
`__init__.pyi` lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
