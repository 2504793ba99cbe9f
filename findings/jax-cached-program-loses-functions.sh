#!/usr/bin/env bash
# JAX, CPU: a program that was read from the persistent compilation cache cannot be written
# again by jax.experimental.serialize_executable, and says so only when it runs.
#
# Expected: a compiled program is a compiled program, wherever it came from: serialize() either
# works or raises. Seen with jax 0.10.2: in the process that compiled it, serialize() and
# deserialize_and_load() work. In a process whose .compile() is served from the cache,
# serialize() returns a smaller payload without an error, deserialize_and_load() returns a
# program without an error, and the first call raises
#   INTERNAL: Error dispatching computation: Function wrapped_sine not found
# So whoever keeps executables must compile with the cache off (or keep the first payload).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2
cat > "$work/once.py" <<'PY'
import sys
import jax, jax.numpy as jnp
from jax.experimental import serialize_executable

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
x = jnp.arange(64.0).reshape(8, 8)
function = jax.jit(lambda x: jnp.where(x > 3, jnp.sin(x) @ x.T + 1, jnp.cumsum(x, 0)))
program = function.lower(x).compile()
expected = float(program(x).sum())
parts = serialize_executable.serialize(program)
again = serialize_executable.deserialize_and_load(*parts)
try:
    print("equal" if float(again(x).sum()) == expected else "different")
except jax.errors.JaxRuntimeError as error:
    print("not found" if "not found" in str(error) else f"another error: {error}")
PY
export JAX_PLATFORMS=cpu
compiled=$("$work/venv/bin/python" "$work/once.py" "$work/cache" 2> /dev/null)
cached=$("$work/venv/bin/python" "$work/once.py" "$work/cache" 2> /dev/null)
echo "jax 0.10.2, written where it was compiled: $compiled; where it was read from the cache: $cached"
[[ $compiled == equal && $cached == "not found" ]]
