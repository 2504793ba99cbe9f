"""Test that `stree-jax bench` runs the benchmarks of the clone."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_a_file_of_the_same_name_in_the_current_folder_is_not_run(tmp_path):
    (tmp_path / "bench.py").write_text("raise SystemExit('of another project')\n")
    code = f"import sys; sys.path.append({str(ROOT)!r})\n"
    code += "from stree_jax.cli.main import console\n"
    code += "sys.argv = ['stree-jax', 'bench', 'nope']\nsys.exit(console())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "unknown benchmark 'nope'" in done.stderr
