"""Exact tree-based speculative decoding for state-space and hybrid models.

Public names are imported when first used (PEP 562), so that `stree-jax --help` need not
wait for jax. The imports below are what type checkers and editors read; the table after
them says the same to Python, and a test that both agree.
"""

from typing import TYPE_CHECKING

from stree_jax.common.lazy import importer, modules_of
from stree_jax.common.version import __version__ as __version__

if TYPE_CHECKING:
    from stree_jax.checkpoints.drafters import load_drafter as load_drafter
    from stree_jax.checkpoints.drafters import save_drafter as save_drafter
    from stree_jax.checkpoints.load import load as load
    from stree_jax.checkpoints.save import save as save
    from stree_jax.constraints.constraint import Constraint as Constraint
    from stree_jax.constraints.reasoning import Reasoning as Reasoning
    from stree_jax.convert.base.errors import CheckpointError as CheckpointError
    from stree_jax.generation.generate import generate as generate
    from stree_jax.generation.generate import stream as stream
    from stree_jax.generation.generate import tune as tune
    from stree_jax.generation.past import Past as Past
    from stree_jax.generation.result import Generation as Generation
    from stree_jax.generation.scoring import score as score
    from stree_jax.generation.scoring import score_tree as score_tree
    from stree_jax.generation.token_logprobs import token_logprobs as token_logprobs
    from stree_jax.generation.tokens import generate_tokens as generate_tokens
    from stree_jax.models.sharding.devices import make_mesh as make_mesh
    from stree_jax.models.sharding.whole_model import shard as shard
    from stree_jax.models.sharding.whole_model import unshard as unshard
    from stree_jax.models.stack.model import Model as Model
    from stree_jax.sampling.settings import Sampling as Sampling
    from stree_jax.sizing.plan import plan as plan
    from stree_jax.verify.certify import certify as certify

_NAMES = {
    "convert.base.errors": "CheckpointError",
    "checkpoints.load": "load",
    "constraints.constraint": "Constraint",
    "constraints.reasoning": "Reasoning",
    "models.stack.model": "Model",
    "checkpoints.save": "save",
    "models.sharding.devices": "make_mesh",
    "generation.generate": "generate stream tune",
    "checkpoints.drafters": "load_drafter save_drafter",
    "models.sharding.whole_model": "shard unshard",
    "sizing.plan": "plan",
    "verify.certify": "certify",
    "generation.result": "Generation",
    "generation.past": "Past",
    "sampling.settings": "Sampling",
    "generation.scoring": "score score_tree",
    "generation.tokens": "generate_tokens",
    "generation.token_logprobs": "token_logprobs",
}
_MODULE_OF = modules_of(_NAMES)
__all__ = ["__version__", *_MODULE_OF]


if not TYPE_CHECKING:  # type checkers would take every name for one that exists
    __getattr__ = importer(__name__, globals())

    def __dir__() -> list[str]:
        return sorted(__all__)
