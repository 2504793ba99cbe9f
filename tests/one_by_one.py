"""Measures how logits of passes over one node differ from those over sixteen.

    python -m tests.one_by_one          # on the default device of JAX

Prints a line for every kind of tiny model and dtype: the largest difference over two
texts of 48 tokens, and the share of tokens whose logits all agree within 1e-4. A larger
difference means that the two programs round differently.
"""

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.models import cast_params
from tests.support.chains import logits_of_chain
from tests.support.tiny import REAL, tiny

KINDS = {
    "mamba2": ("mamba", "mamba"),
    "hybrid": ("mamba", "mlp", "attention", "mlp", "mamba"),
    "attention": ("attention", "mlp"),
}


def main():
    print(jax.devices()[0].device_kind)
    for kind, layers in KINDS.items():
        model = tiny(1, layers=layers)
        for dtype in (jnp.float32, jnp.bfloat16, jnp.int8):
            params = cast_params(model.config, model.params, dtype)
            cast, most = model.replace(params=params), []
            for seed in range(2):
                text = np.random.default_rng(seed).integers(8, REAL, 48)
                one, many = (logits_of_chain(cast, text, T) for T in (1, 16))
                most.append(np.abs(one - many)[:, :REAL].max(axis=1))
            agree = np.mean(np.concatenate(most) < 1e-4)
            name = jnp.dtype(dtype).name
            print(f"{kind:9} {name:8} {np.max(most):.1e} {agree:.0%}", flush=True)


if __name__ == "__main__":
    main()
