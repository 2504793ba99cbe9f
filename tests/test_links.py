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
MADE = ROOT / "docs/reference/cli.md"  # by docs/tools/hooks.py; links to it have no "#"


def prose(page):
    return re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.S | re.M)


def anchors(text):
    """What may stand behind a "#", as GitHub makes it of headings."""
    seen, found = Counter(), set(re.findall(r'<a id="([^"]+)"', text))
    found |= set(re.findall(r"^::: (\S+)", text, re.M))  # of the API pages
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower().strip()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def astray(page):
    """Links of a page that lead nowhere."""
    found = []
    for link in LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if ELSEWHERE.match(link) or (target.resolve() == MADE and not anchor):
            continue
        if not target.exists() or (anchor and anchor not in anchors(prose(target))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert not astray(page)


def test_links_astray_are_found(tmp_path):
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# On `a` CPU: [x](y)\n## Again\n## Again\n")
    right = (
        "[a](other.md#on-a-cpu-x) [b](other.md#again-1) [c](#here) [d](https://e.f#g)"
    )
    wrong = "other.md#again-2", "none.md", "#there"
    links = "".join(f" ![i]({link})" for link in wrong)
    page.write_text(f"# Here\n{right}{links}\n```sh\n[in](code)\n```\n")
    assert astray(page) == list(wrong)
