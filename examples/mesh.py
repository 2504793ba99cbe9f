"""A model sharded over several devices (tensor parallelism): the same text as on one.

Prints the devices, the parameters on each of them, and whether the texts are identical.
Run it: JAX_NUM_CPU_DEVICES=8 python examples/mesh.py [--mesh data=2,model=4]
"""

import argparse

import jax

import stree_jax


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="default: the bundled model")
    parser.add_argument("--mesh", default="data=2,model=4", help="axes and devices")
    args = parser.parse_args()

    # "model" splits each layer, "data" the rows of a batch. With GPUs, leave
    # JAX_NUM_CPU_DEVICES unset and choose a mesh of at most as many as there are.
    mesh = stree_jax.make_mesh(args.mesh)
    prompts = ["def mean(xs):\n", "import os\n"]
    options = dict(drafter="lookup", tree="chain:4", max_new_tokens=32)

    sharded = stree_jax.load(args.model, dtype="float32", mesh=mesh)
    result = stree_jax.generate(sharded, prompts, **options)
    alone = stree_jax.load(args.model, dtype="float32")
    expected = stree_jax.generate(alone, prompts, **options)

    print(f"{len(jax.devices())} devices, mesh {dict(mesh.shape)}")
    arrays = jax.tree.leaves(sharded.params)
    here = sum(array.addressable_shards[0].data.size for array in arrays)
    whole = sum(array.size for array in jax.tree.leaves(alone.params))
    print(f"parameters on one device: {here / 1e6:.1f} M of {whole / 1e6:.1f} M")
    print(prompts[0] + result.texts[0])
    print("identical to one device:", result.tokens == expected.tokens)


if __name__ == "__main__":
    main()
