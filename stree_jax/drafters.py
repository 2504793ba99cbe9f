"""Drafters of the library, and what a custom drafter is made of.

A custom drafter is a pytree with the three methods of `Drafter`: `init`, `propose` and
`commit`. The functions at the end help to write `propose`.
"""

from stree_jax.checkpoints.draft_tokens import draft_vocabulary as draft_vocabulary
from stree_jax.checkpoints.draft_tokens import (
    with_draft_vocabulary as with_draft_vocabulary,
)
from stree_jax.models.drafters.assistant import Assistant as Assistant
from stree_jax.models.drafters.dflash import DFlash as DFlash
from stree_jax.models.drafters.eagle import Eagle as Eagle
from stree_jax.models.drafters.heads import Heads as Heads
from stree_jax.speculation.draft import Draft as Draft
from stree_jax.speculation.draft import only_root as only_root
from stree_jax.speculation.drafter import Drafter as Drafter
from stree_jax.speculation.drafter import DrafterBase as DrafterBase
from stree_jax.speculation.drafter import Prompts as Prompts
from stree_jax.speculation.drafter import Update as Update
from stree_jax.speculation.drafters.earlier import EarlierTexts as EarlierTexts
from stree_jax.speculation.drafters.model import draw_level as draw_level
from stree_jax.speculation.drafters.model import empty_draft as empty_draft
from stree_jax.speculation.drafters.ngram_pairs import WithNGrams as WithNGrams
from stree_jax.speculation.drafters.ngrams import NGrams as NGrams
from stree_jax.speculation.drafters.staged import Staged as Staged
from stree_jax.speculation.layout import tree_levels as tree_levels
