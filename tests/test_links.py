"""Links between the pages of the project: the file is there, and so is the heading."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    *ROOT.glob("*.md"),
    *(
        page
        for room in ("bench", "docs", "tests")
        for page in ROOT.glob(f"{room}/**/*.md")
    ),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
ELSEWHERE = re.compile(r"[a-z]+:")


def prose(page):
    return re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.S | re.M)


def anchors(text):
    """What may stand behind a "#", as GitHub makes it of headings."""
    seen, found = Counter(), set(re.findall(r'<a id="([^"]+)"', text))
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower().strip()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    astray = []
    for link in LINK.findall(prose(page)):
        if ELSEWHERE.match(link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists():
            astray.append(link)
        elif anchor and target.suffix == ".md" and anchor not in anchors(prose(target)):
            astray.append(link)
    assert not astray


def test_a_link_astray_is_found():
    text = "# On `a` CPU: [x](y)\n## Again\n## Again\n"
    assert anchors(text) == {"on-a-cpu-x", "again", "again-1"}
    assert LINK.findall("[a](b.md#c), ![d](e.png)") == ["b.md#c", "e.png"]
