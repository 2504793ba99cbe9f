"""Exact tree-based speculative decoding for state-space and hybrid models.

Public names are imported when first used (SPEC 1), so that `stree-jax --help` need not
wait for jax. `__init__.pyi` lists them.
"""

import lazy_loader

from stree_jax.common.version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
