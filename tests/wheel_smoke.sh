#!/usr/bin/env bash
# Builds the sdist, and the wheel from it; installs the wheel outside the checkout and generates
# text with the bundled pair.
set -euo pipefail
unset PYTHONPATH  # or pip would find the checkout installed already
python=${1:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet build

# The sdist holds all that git does, but for links: they double folders that it has.
git archive --prefix source/ HEAD | tar -x -C "$work"
"$work/tools/bin/python" -m build --sdist --outdir "$work/dist" "$work/source" > /dev/null
sdist=("$work"/dist/*.tar.gz)
git ls-tree -r HEAD | sed -n 's/^100.*\t//p' | sort > "$work/wanted"
tar -tzf "${sdist[0]}" | cut -d / -f 2- | sort > "$work/held"
if missing=$(comm -23 "$work/wanted" "$work/held") && [[ -n $missing ]]; then
  echo "the sdist lacks:" "$missing" >&2 && exit 1
fi

mkdir "$work/unpacked"
tar -xzf "${sdist[0]}" -C "$work/unpacked" --strip-components 1
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/dist" "$work/unpacked"
if "$python" -m zipfile -l "$work"/dist/*.whl | grep -E '\.(png|svg|md|cc|h) '; then
  echo "the wheel holds figures, pages or sources" >&2 && exit 1
fi
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "$work"/dist/*.whl

# Without a compiler the package installs, too, and has no kernels.
rm -rf "$work/unpacked/build"
CC=false CXX=false "$python" -m pip wheel --quiet --no-deps \
  --wheel-dir "$work/bare" "$work/unpacked"
if "$python" -m zipfile -l "$work"/bare/*.whl | grep _native; then
  echo "kernels without a compiler" >&2 && exit 1
fi

cd "$work"
kernels=$("$work/venv/bin/python" -m stree_jax.cpu_kernels)
echo "$kernels"
if command -v g++ > /dev/null && [[ $kernels == *none* ]]; then exit 1; fi
"$work/venv/bin/stree-jax" generate "def add(a, b):" --max-new-tokens 16 --compare
# Benchmarks are not installed; one line says where they are.
[[ $("$work/venv/bin/stree-jax" bench decode 2>&1 || true) == *"git clone https://"* ]]
"$work/venv/bin/python" - <<'PY'
import re, sys
from importlib.metadata import metadata
import stree_jax, stree_jax.convert
shown = metadata("stree-jax")["Description"]  # by package indexes, which host no files
assert "Apache-2.0" in shown and not re.findall(r"\]\((?!https?:|#)[^)]*\)", shown)
assert not {"models", "convert", "pallas_kernels", "cpu_kernels", "bench"} & set(sys.modules), "generic names leaked"
assert "torch" not in sys.modules and "transformers" not in sys.modules
print("wheel", stree_jax.__version__, "ok")
PY
