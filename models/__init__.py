"""Models: config, parameters, state and the hybrid stack as pure functions.

Axes: B batch; T tokens of a forward pass (tree nodes); Tq queried nodes, a subset of
the T; S rows of a KV cache (capacity for committed tokens); M longest path; d width of
the residual stream; V vocabulary; H SSM heads; P head size; N state size; G groups; K
conv taps; C conv channels; Hq/Hk query/KV heads; hd attention head size; E experts.

Public names are imported when they are first used, because most of them import jax.
`__init__.pyi` lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
