#!/usr/bin/env bash
# JAX, meshes with explicit axes: padding an axis that is not sharded fails in several modes, because
# jnp.pad reads the edges of every axis, also of those whose width is (0, 0).
#
# Expected: jnp.pad(x, ((0, 0), (0, 1)), mode=...) of x [8@data, 2] changes axis 1 only, which every
# device has whole, so the mode makes no difference to the sharding. Seen with jax 0.10.2 (0.12.0.1
# is the same for "edge"): "constant", "reflect", "symmetric" and "wrap" return [8@data, 3]. "edge" and
# "linear_ramp" raise ShardingTypeError about a slice of axis 0 with one row; "mean", "maximum" and
# "empty" raise it because the operands of a concatenation differ in their sharding.
# So a trainer that pads the tokens of its rows uses mode "constant".
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2
cat > "$work/modes.py" <<'PY'
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
jax.set_mesh(mesh)
x = jax.device_put(jnp.arange(16.0).reshape(8, 2), NamedSharding(mesh, P("data")))
MODES = "constant reflect symmetric wrap edge linear_ramp mean maximum empty"
for mode in MODES.split():
    try:
        y = jax.jit(lambda x: jnp.pad(x, ((0, 0), (0, 1)), mode=mode))(x)
        print(mode, y.sharding.spec[0])
    except Exception as error:
        print(mode, type(error).__name__)
PY
export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4
seen=$("$work/venv/bin/python" "$work/modes.py" 2> /dev/null | paste -sd, -)
echo "jax 0.10.2: $seen"
expected="constant data,reflect data,symmetric data,wrap data"
for mode in edge linear_ramp mean maximum empty; do
  expected+=",$mode ShardingTypeError"
done
[[ $seen == "$expected" ]]
