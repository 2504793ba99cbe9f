"""The page about the CPU kernels names each of them."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "explanation" / "cpu-kernels.md"
KERNEL = re.compile(r"^STREE_KERNEL\((\w+)", re.M)


def test_the_page_names_every_kernel():
    sources = sorted((ROOT / "cpu_kernels" / "src").glob("*_ffi.cc"))
    kernels = [name for file in sources for name in KERNEL.findall(file.read_text())]
    assert len(kernels) > 20
    page = PAGE.read_text("utf-8")
    assert [name for name in kernels if f"`{name}`" not in page] == []
