"""Names that users type, and the closest known name for one that is misspelt."""

import difflib
from collections.abc import Iterable

MIN_SIMILARITY = 0.6  # difflib ratio of a misspelt name and the one that is suggested
# Names of drafters that are not paths. `checkpoints.pair` says what they mean.
LOOKUP, MTP, NO_DRAFTER = "lookup", "mtp", "none"
DRAFTERS = (
    LOOKUP,
    MTP,
    NO_DRAFTER,
    "demo",
    "demo-heads",
    "demo-dspark",
    "demo-drafter",
)


def closest(word: str, names: Iterable[str]) -> str | None:
    """Returns the name that a misspelt word most likely stands for, or None."""
    by_lower = {name.lower(): name for name in names}
    found = difflib.get_close_matches(word.lower(), by_lower, 1, MIN_SIMILARITY)
    return by_lower[found[0]] if found else None


def suggestion(word: str, names: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: the closest known name, or
    all of them."""
    names = list(names)
    close = closest(word, names)
    return f"did you mean {close!r}?" if close else f"known: {', '.join(names)}"
