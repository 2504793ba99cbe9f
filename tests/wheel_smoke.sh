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

# Without a compiler the package installs, too, and has no kernels.
mkdir "$work/bare"
git archive HEAD | tar -x -C "$work/bare"
CC=false CXX=false "$python" -m pip wheel --quiet --no-deps \
  --wheel-dir "$work/bare/dist" "$work/bare"
if "$python" -m zipfile -l "$work"/bare/dist/*.whl | grep _native; then
  echo "kernels without a compiler" >&2 && exit 1
fi

cd "$work"
kernels=$("$work/venv/bin/python" -m stree_jax.cpu_kernels)
echo "$kernels"
if command -v g++ > /dev/null && [[ $kernels == *none* ]]; then exit 1; fi
"$work/venv/bin/stree-jax" generate "def add(a, b):" --max-new-tokens 16 --compare
"$work/venv/bin/python" - <<'PY'
import sys
import stree_jax, stree_jax.convert
assert not {"models", "convert", "pallas_kernels", "cpu_kernels"} & set(sys.modules), "generic names leaked"
assert "torch" not in sys.modules and "transformers" not in sys.modules
print("wheel", stree_jax.__version__, "ok")
PY
