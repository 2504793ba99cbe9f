#!/usr/bin/env bash
# Build the wheel, install it outside the checkout, generate with the bundled pair.
set -euo pipefail
unset PYTHONPATH  # or pip would find the checkout installed already
python=${1:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/dist" .
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "$work"/dist/*.whl
cd "$work"
"$work/venv/bin/stree-jax" generate "def add(a, b):" --max-new-tokens 16 --compare
"$work/venv/bin/python" - <<'PY'
import sys
import stree_jax, stree_jax.convert
assert not {"models", "convert", "pallas_kernels", "cpu_kernels"} & set(sys.modules), "generic names leaked"
assert "torch" not in sys.modules and "transformers" not in sys.modules
print("wheel", stree_jax.__version__, "ok")
PY
