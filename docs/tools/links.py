"""Finds the links of a page of `docs/` that leave `docs/`."""

import posixpath
import re
from collections.abc import Iterator

IMAGES = (".png", ".svg", ".jpg", ".gif", ".webp")
FIGURES = "figures"  # where images from outside docs/ are in the site

FENCE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$", re.S | re.M)
LINK = re.compile(r"(\]\()([^)\s]+)((?:\s+\"[^\"]*\")?\))")
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.I)


def outside_links(text: str, uri: str) -> Iterator[tuple[tuple[int, int], str, str]]:
    """Yields the links of a page that leave `docs/`.

    Args:
      text: the page's Markdown; code blocks are skipped.
      uri: path of the page in `docs/`.

    Yields:
      where the link is in the text, the path that it leads to from the root of the
      repository, and its anchor with "#" or an empty text.
    """
    blocks = [block.span() for block in FENCE.finditer(text)]
    for match in LINK.finditer(text):
        target = match[2]
        inside = any(begin <= match.start() < end for begin, end in blocks)
        if inside or SCHEME.match(target) or target.startswith(("#", "/")):
            continue
        path, mark, anchor = target.partition("#")
        full = posixpath.normpath(posixpath.join("docs", posixpath.dirname(uri), path))
        if full != "docs" and not full.startswith("docs/"):
            yield match.span(2), full, mark + anchor


def image_uri(path: str) -> str:
    """Returns where the site has an image of the repository; empty for other files."""
    if not path.endswith(IMAGES):
        return ""
    return f"{FIGURES}/{posixpath.basename(path)}"
