#!/usr/bin/env bash
# Installs the wheel and the sdist of a folder in fresh virtual environments, with and without a
# C++ compiler, generates text with the bundled pair outside the checkout, and prints a table.
#
#   tests/release_matrix.sh DIST PYTHON...      (make release-check)
#
# A row fails if the package does not install or generate, or if it lacks the CPU kernels or has
# them without a compiler. All rows must have the same text. KINDS and COMPILERS choose fewer rows.
set -uo pipefail
[[ $# -ge 2 ]] || { echo "usage: $0 DIST PYTHON..." >&2; exit 2; }
dist=$(cd "$1" && pwd) && shift || exit 2
unset PYTHONPATH JAX_COMPILATION_CACHE_DIR
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 2
export STREE_JAX_CACHE=off JAX_PLATFORMS=cpu PIP_CACHE_DIR=$work/cache
row=0 failed=0
touch texts

try() {  # PYTHON FILE COMPILER; prints the last cells of a row
  local bin=$work/venv/bin own=$work/row$row compiler=(env) jax kernels
  [[ $3 == none ]] && compiler=(env CC=/bin/false CXX=/bin/false)
  rm -rf venv && "$1" -m venv venv || return
  # pip keeps the wheel that it builds from a path, kernels included: each row has its own path.
  mkdir "$own" && cp "$2" "$own" || return
  "${compiler[@]}" "$bin/pip" install --quiet --no-compile "$own"/* || return
  jax=$("$bin/python" -c 'import jax; print(jax.__version__)') || return
  kernels=$("$bin/python" -m stree_jax.cpu_kernels) || return
  "$bin/stree-jax" generate "def f(" --max-new-tokens 16 | grep -v '^\[' > text || return
  md5sum < text >> texts
  kernels=${kernels#*: }
  if [[ $2 == *.tar.gz && $3 == none ]]; then
    [[ $kernels == none* ]] || { echo "kernels without a compiler" >&2; return 1; }
  else
    [[ $kernels != none* ]] || { echo "no kernels: $kernels" >&2; return 1; }
  fi
  echo "$jax | $kernels | \`$(head -n 1 text)\`"
}

echo "| Python | file | compiler | jax | CPU kernels | first line of the text |"
echo "| --- | --- | --- | --- | --- | --- |"
for python in "$@"; do
  version=$("$python" -c 'import platform; print(platform.python_version())') || exit 2
  for kind in ${KINDS:-wheel sdist}; do
    for compiler in ${COMPILERS:-yes none}; do
      if [[ $kind == wheel ]]; then files=("$dist"/*.whl); else files=("$dist"/*.tar.gz); fi
      row=$((row + 1))
      if cells=$(try "$python" "${files[0]}" "$compiler" 2> log); then
        echo "| $version | $kind | $compiler | $cells |"
      else
        echo "| $version | $kind | $compiler | **failed** | | |"
        tail -n 20 log >&2
        failed=1
      fi
      rm -rf "row$row"
    done
  done
done
if [[ $(sort -u texts | wc -l) -ne 1 ]]; then
  echo "the rows have different texts" >&2
  failed=1
fi
exit "$failed"
