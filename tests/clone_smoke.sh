#!/usr/bin/env bash
# Runs README's lines as they are written, in a fresh clone and environment, without make. Prints
# the seconds of each block. A line that names `cuda` is left out.
set -euo pipefail
unset PYTHONPATH JAX_COMPILATION_CACHE_DIR
python=${1:-python3}
work=$(mktemp -d)
export STREE_JAX_CACHE=$work/cache
trap 'kill $(jobs -p) 2> /dev/null || true; rm -rf "$work"' EXIT
git clone --quiet "$(git rev-parse --show-toplevel)" "$work/clone"
cd "$work/clone"
"$python" -m venv "$work/venv"
. "$work/venv/bin/activate"

python - "$work" <<'PY'
import re, sys
from pathlib import Path
blocks = re.findall(r"^```(sh|python)\n(.*?)^```", Path("README.md").read_text(), re.M | re.S)
for i, (language, code) in enumerate(blocks):
    kept = [line for line in code.splitlines() if "cuda" not in line]
    Path(sys.argv[1], f"block-{i:02}.{language}").write_text("\n".join(kept) + "\n")
PY

for block in "$work"/block-*; do
  began=$SECONDS
  case $block in
    *.sh) . "$block" > "$work/out" 2> "$work/err" ;; # here, so that a server can be ended
    *.python) python < "$block" > "$work/out" 2> "$work/err" ;;
  esac || { cat "$block" "$work/out" "$work/err" >&2; exit 1; }
  echo "$(basename "$block"): $((SECONDS - began)) s, $(wc -l < "$work/out") lines," \
    "$(wc -l < "$work/err") on standard error"
  if grep -F "decoding is slow here" "$work/err"; then exit 1; fi
done
kernels=$(python -m stree_jax.cpu_kernels)
echo "$kernels"
if command -v g++ > /dev/null && [[ $kernels == *none* ]]; then exit 1; fi

# Without -e, the clone hides the installed package and says so in one line.
rm cpu_kernels/_native*.so
[[ $(python -c "from stree_jax import cpu_kernels; cpu_kernels.available()" 2>&1) == *"pip install -e"* ]]
