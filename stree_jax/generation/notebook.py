"""Writes HTML for notebooks: generated text, with every token coloured by its
origin."""

import html
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# A translucent background under text in the page's own colour is readable on light and
# dark pages. Text without an entry here was chosen by the target alone.
_TINTS = {
    1: "rgba(46, 160, 67, 0.35)",  # green
    2: "rgba(56, 139, 253, 0.35)",  # blue
    3: "rgba(210, 153, 34, 0.40)",  # yellow
    4: "rgba(219, 97, 162, 0.35)",  # pink
    6: "rgba(163, 113, 247, 0.35)",  # purple
}
UNKNOWN = -1  # the origin of a text without a decoder
_BOX = (
    "white-space: pre-wrap; overflow-wrap: anywhere; max-height: 30em; overflow: auto; "
    "border: 1px solid rgba(128, 128, 128, 0.4); padding: 0.5em; margin: 0.3em 0;"
)


class HtmlRow(NamedTuple):
    """A generated text to be shown.

    Attributes:
      heading: one line about the text.
      runs: pieces of the text, and the origin of each as an index of `draft.ORIGINS`;
        UNKNOWN if it is not known.
      omitted: number of tokens after the shown ones.
    """

    heading: str
    runs: Sequence[tuple[str, int]]
    omitted: int = 0


def html_of(
    title: str, rows: Sequence[HtmlRow], names: Mapping[int, str], note: str = ""
) -> str:
    """Returns a fragment of HTML with a title, a legend and the texts.

    All strings are escaped. The fragment has inline styles and no scripts.

    Args:
      title: one line above the texts.
      rows: the texts.
      names: what each origin is called; the legend lists those that occur.
      note: one line below the texts.
    """
    present = sorted({o for row in rows for _, o in row.runs} - {UNKNOWN})
    parts = [f"<div><b>{html.escape(title)}</b></div>"]
    if present:
        legend = " ".join(_span(names[origin], origin, names) for origin in present)
        parts.append(f"<div>proposed by: {legend}</div>")
    for row in rows:
        text = "".join(_span(piece, origin, names) for piece, origin in row.runs)
        if row.omitted:
            text += f"<i> ... {row.omitted} more tokens</i>"
        parts.append(f"<div>{html.escape(row.heading)}</div>")
        parts.append(f'<pre style="{_BOX}">{text}</pre>')
    if note:
        parts.append(f"<div>{html.escape(note)}</div>")
    return f"<div>{''.join(parts)}</div>"


def _span(text: str, origin: int, names: Mapping[int, str]) -> str:
    """Returns escaped text, with a background and a tooltip if it was drafted."""
    escaped = html.escape(text)
    if origin not in _TINTS:
        return f"<span>{escaped}</span>"
    style = f"background: {_TINTS[origin]}; border-radius: 2px"
    return (
        f'<span style="{style}" title="{html.escape(names[origin])}">{escaped}</span>'
    )
