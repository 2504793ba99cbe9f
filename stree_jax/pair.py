"""A target and its drafter, by the names that commands take."""

from stree_jax.checkpoint import Model, load
from stree_jax.speculation.loop import LOOKUP

DEMO, AUTO, NO_DRAFTER = "demo", "auto", "none"


def load_pair(
    target: str, drafter: str | None, dtype: str
) -> tuple[Model, Model | str | None]:
    """The target and what drafts for it: a model, "lookup", or None.

    Args:
      target: a directory, a hub id or "demo", the bundled target.
      drafter: likewise ("demo" is the bundled drafter), "lookup" or "none"; None, or
        "auto", is the bundled one beside the bundled target, and lookup beside others.
      dtype: "float32" or "bfloat16".
    """
    if drafter in (None, AUTO):
        drafter = DEMO if target == DEMO else LOOKUP
    model = load(target, dtype=dtype)
    if drafter == NO_DRAFTER:
        return model, None
    if drafter == LOOKUP:
        return model, LOOKUP
    return model, load("demo-drafter" if drafter == DEMO else drafter, dtype=dtype)
