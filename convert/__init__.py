"""Reads checkpoints of other libraries, and converts them to our own format and
back.

Public names are imported when they are first used, because some of them import jax.
`__init__.pyi` lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
