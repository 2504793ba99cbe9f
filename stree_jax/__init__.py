"""Exact tree-based speculative decoding for state-space and hybrid models."""

from stree_jax.checkpoint import CheckpointError as CheckpointError
from stree_jax.checkpoint import Model as Model
from stree_jax.checkpoint import load as load
from stree_jax.checkpoint import save as save
from stree_jax.generation import generate as generate
from stree_jax.generation import stream as stream
from stree_jax.result import Generation as Generation
from stree_jax.result import Past as Past
from stree_jax.sampling.settings import Sampling as Sampling
from stree_jax.sampling.settings import sampling_rows as sampling_rows
from stree_jax.scoring import first_difference as first_difference
from stree_jax.scoring import score as score
from stree_jax.scoring import score_tree as score_tree
from stree_jax.speculation.accept import Rule as Rule
from stree_jax.speculation.accept import resolve_rule as resolve_rule
from stree_jax.speculation.loop import generate_tokens as generate_tokens
from stree_jax.speculation.tree import NAMED_TREES as NAMED_TREES
from stree_jax.speculation.tree import Beam as Beam
from stree_jax.speculation.tree import Tree as Tree
from stree_jax.speculation.tree import chain as chain
from stree_jax.speculation.tree import full_tree as full_tree
from stree_jax.speculation.tree import layered as layered
from stree_jax.speculation.tree import make_tree as make_tree
from stree_jax.version import __version__ as __version__
