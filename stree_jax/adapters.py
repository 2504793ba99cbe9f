"""LoRA adapters that are added to a model without being merged into its parameters."""

from stree_jax.checkpoints.adapters import load_adapter as load_adapter
from stree_jax.models.stack.adapters import with_adapter as with_adapter
from stree_jax.models.weights.adapted import LowRank as LowRank
