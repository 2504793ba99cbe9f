#!/usr/bin/env bash
# XLA for TPUs: "bytes accessed" of cost_analysis() counts what moves inside the chip, too, so that a
# product of two rows seems to read five times the bytes of a product of one row.
#
# Expected: x [t, 4096] @ w [4096, 4096] in bfloat16 is bound by reading w, 33.6 MB, so the count is
# about 33.6 MB for any small t. Seen with jax 0.10.2 and libtpu 0.0.42.1, compiled for a v5e that need
# not be there: 33.6 MB for t = 1, and 167.8 and 168.0 MB for t = 2 and 16, of which 100.7 MB are
# "bytes accessedout{}", though the result has 16 and 131 kB. memory_analysis() says 33.6 MB of arguments
# for all three. The weight is copied to the chip's memory in between, and each copy counts twice.
# So ratios of "bytes accessed" between programs say nothing about the bandwidth that they need.
# (Downloads 700 MB.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 libtpu==0.0.42.1
cat > "$work/count.py" <<'PY'
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

chip = topologies.get_topology_desc(
    platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=(1, 1, 1)
)
place = NamedSharding(Mesh(chip.devices[:1], ("x",)), P())
shape = lambda *axes: jax.ShapeDtypeStruct(axes, jnp.bfloat16, sharding=place)
for t in (1, 2, 16):
    product = jax.jit(lambda x, w: jax.nn.silu(x @ w))
    program = product.lower(shape(t, 4096), shape(4096, 4096)).compile()
    accessed = program.cost_analysis()["bytes accessed"]
    held = program.memory_analysis().argument_size_in_bytes
    print(f"{t} rows: {accessed / 1e6:.1f} of {held / 1e6:.1f} MB")
PY
export JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost
export ALLOW_MULTIPLE_LIBTPU_LOAD=1
seen=$("$work/venv/bin/python" "$work/count.py" 2> /dev/null | grep rows: | paste -sd';' -)
echo "jax 0.10.2, libtpu 0.0.42.1: $seen"
[[ $seen == "1 rows: 33.6 of 33.6 MB;2 rows: 167.8 of 33.6 MB;16 rows: 168.0 of 33.7 MB" ]]
