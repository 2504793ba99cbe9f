"""Matrices that keep a file's 4 to 8 bits per number, and products with them.

`kind.py` describes the layout and how to add a kind: a subclass of `PanelKind`, a line
in `KINDS`, and its traits in `cpu_kernels/src/panels.h`.
"""

from stree_jax.models.weights.panels.ggml import GGML
from stree_jax.models.weights.panels.groups import GROUPS
from stree_jax.models.weights.panels.kind import PanelKind as PanelKind

KINDS: dict[str, PanelKind] = {kind.name: kind for kind in (*GGML, *GROUPS)}
