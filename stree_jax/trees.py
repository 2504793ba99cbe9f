"""Trees of draft tokens, and the rules that accept them: `tree=` and `rule=`."""

from stree_jax.speculation.accept import Rule as Rule
from stree_jax.speculation.accept import Typical as Typical
from stree_jax.speculation.tree import NAMED_TREES as NAMED_TREES
from stree_jax.speculation.tree import Auto as Auto
from stree_jax.speculation.tree import Beam as Beam
from stree_jax.speculation.tree import Topology as Topology
from stree_jax.speculation.tree import Tree as Tree
from stree_jax.speculation.tree import cartesian as cartesian
from stree_jax.speculation.tree import chain as chain
from stree_jax.speculation.tree import full_tree as full_tree
from stree_jax.speculation.tree import layered as layered
from stree_jax.speculation.tree import make_tree as make_tree
from stree_jax.speculation.tree import pruned as pruned
from stree_jax.speculation.tree import resolve_tree as resolve_tree
