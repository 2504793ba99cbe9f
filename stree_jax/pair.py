"""A target and its drafter, by the names that commands take."""

from stree_jax.checkpoint import Model, load

DEMO, NO_DRAFTER = "demo", "none"


def load_pair(
    target: str, drafter: str | None, dtype: str
) -> tuple[Model, Model | None]:
    """The target and, unless it is "none", the drafter.

    Args:
      target: a directory, a hub id or "demo", the bundled target.
      drafter: likewise ("demo" is the bundled drafter), or "none"; None is the bundled
        one beside the bundled target, and none beside any other.
      dtype: "float32" or "bfloat16".
    """
    if drafter is None:
        drafter = DEMO if target == DEMO else NO_DRAFTER
    model = load(target, dtype=dtype)
    if drafter == NO_DRAFTER:
        return model, None
    return model, load("demo-drafter" if drafter == DEMO else drafter, dtype=dtype)
