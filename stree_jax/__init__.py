"""Exact tree-based speculative decoding for state-space and hybrid models.

Public names are imported when first used (PEP 562), so that `stree-jax --help` need not
wait for jax. The imports below are what type checkers and editors read; the table after
them says the same to Python, and a test that both agree.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stree_jax.common.version import __version__ as __version__

if TYPE_CHECKING:
    from stree_jax.checkpoints.draft_tokens import draft_vocabulary as draft_vocabulary
    from stree_jax.checkpoints.draft_tokens import (
        with_draft_vocabulary as with_draft_vocabulary,
    )
    from stree_jax.checkpoints.drafters import load_drafter as load_drafter
    from stree_jax.checkpoints.drafters import save_drafter as save_drafter
    from stree_jax.checkpoints.load import Model as Model
    from stree_jax.checkpoints.load import load as load
    from stree_jax.checkpoints.save import save as save
    from stree_jax.convert.base.errors import CheckpointError as CheckpointError
    from stree_jax.generation.generate import generate as generate
    from stree_jax.generation.generate import stream as stream
    from stree_jax.generation.generate import tune as tune
    from stree_jax.generation.result import Generation as Generation
    from stree_jax.generation.result import Past as Past
    from stree_jax.generation.scoring import first_difference as first_difference
    from stree_jax.generation.scoring import score as score
    from stree_jax.generation.scoring import score_tree as score_tree
    from stree_jax.models.drafters.heads import Heads as Heads
    from stree_jax.models.sharding.devices import make_mesh as make_mesh
    from stree_jax.models.sharding.placement import shard as shard
    from stree_jax.sampling.settings import Sampling as Sampling
    from stree_jax.sampling.settings import sampling_rows as sampling_rows
    from stree_jax.sizing.plan import plan as plan
    from stree_jax.sizing.traffic import Traffic as Traffic
    from stree_jax.speculation.accept import Rule as Rule
    from stree_jax.speculation.accept import resolve_rule as resolve_rule
    from stree_jax.speculation.adaptive.policy import StepTimes as StepTimes
    from stree_jax.speculation.drafters.fitted import WithNGrams as WithNGrams
    from stree_jax.speculation.drafters.ngrams import NGrams as NGrams
    from stree_jax.speculation.drafters.staged import Staged as Staged
    from stree_jax.speculation.loop import generate_tokens as generate_tokens
    from stree_jax.speculation.tree import NAMED_TREES as NAMED_TREES
    from stree_jax.speculation.tree import Auto as Auto
    from stree_jax.speculation.tree import Beam as Beam
    from stree_jax.speculation.tree import Tree as Tree
    from stree_jax.speculation.tree import cartesian as cartesian
    from stree_jax.speculation.tree import chain as chain
    from stree_jax.speculation.tree import full_tree as full_tree
    from stree_jax.speculation.tree import layered as layered
    from stree_jax.speculation.tree import make_tree as make_tree
    from stree_jax.speculation.tree import pruned as pruned

_NAMES = {
    "convert.base.errors": "CheckpointError",
    "checkpoints.load": "Model load",
    "checkpoints.save": "save",
    "models.sharding.devices": "make_mesh",
    "generation.generate": "generate stream tune",
    "checkpoints.drafters": "load_drafter save_drafter",
    "checkpoints.draft_tokens": "draft_vocabulary with_draft_vocabulary",
    "models.drafters.heads": "Heads",
    "models.sharding.placement": "shard",
    "sizing.plan": "plan",
    "generation.result": "Generation Past",
    "sampling.settings": "Sampling sampling_rows",
    "generation.scoring": "first_difference score score_tree",
    "speculation.accept": "Rule resolve_rule",
    "speculation.adaptive.policy": "StepTimes",
    "speculation.loop": "generate_tokens",
    "speculation.drafters.fitted": "WithNGrams",
    "speculation.drafters.ngrams": "NGrams",
    "speculation.drafters.staged": "Staged",
    "speculation.tree": "NAMED_TREES Auto Beam Tree cartesian chain full_tree layered "
    "make_tree pruned",
    "sizing.traffic": "Traffic",
}
_MODULE_OF = {name: m for m, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__", *_MODULE_OF]


if not TYPE_CHECKING:  # type checkers would take every name for one that exists

    def __getattr__(name: str) -> Any:
        """Imports and returns a public name or a module of the package."""
        if name in _MODULE_OF:
            value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
            globals()[name] = value  # found without this function from now on
            return value
        try:
            if not name.startswith("_"):
                return import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted(__all__)
