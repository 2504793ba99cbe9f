"""Compares models sharded over eight devices with one device, family by family.

    python -m tests.mesh_check [--families NAME ...] [--meshes 2x4 ...] [--drafters]

For every family and mesh ("data x model"), prints the largest difference of logits,
relative to the largest logit, and whether greedy text with prompt lookup in a tree is
that of one device. With --drafters, tests every drafter and kind of request on hybrids
with Mamba2 and with the delta rule. The exit code is 1 if anything differs.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np

import stree_jax
from stree_jax.drafters import Staged
from stree_jax.models.drafters.heads import Heads, HeadsConfig, init_heads
from tests.support.families import FAMILIES, mesh_of, prompts, random_model
from tests.support.tiny import perturbed

DEVICES = 8
MESHES = ("1x8", "2x4", "4x2", "8x1")
TOLERANCE = 1e-5  # relative to the largest logit; sums are in another order
NEW = 6
HYBRIDS, WITH_MTP = ("bamba", "qwen3.5"), ("nemotron-h", "qwen3.5")


def check_family(name, meshes, text=True):
    """Prints lines of the table. Returns whether everything agrees, with or without
    text."""
    model, well = random_model(FAMILIES[name], 1), True
    asked, ids = prompts(model.config), prompts(model.config)[-1:]

    def written(model):
        options = {"max_new_tokens": NEW, "drafter": "lookup", "tree": "B"}
        return stree_jax.generate(model, asked, **options).tokens if text else []

    tokens = written(model)
    logits = np.asarray(stree_jax.score(model, ids))
    for mesh in meshes:
        cut = stree_jax.shard(model, mesh_of(mesh))
        away = np.abs(np.asarray(stree_jax.score(cut, ids)) - logits).max()
        share = away / np.abs(logits).max()
        same = written(cut) == tokens
        well &= bool(same and share < TOLERANCE)
        parts = dict(cut.cut.parts)
        print(f"{name:13} {mesh} {share:.1e} {same} {parts}", flush=True)
    return well


def drafters(model, mesh):
    """Yields names, and options on one device and on the mesh."""
    config = model.config
    drafter = model.replace(params=perturbed(model.params, 0.02, 3))
    own = HeadsConfig(config.d_model, config.vocab_size, 2, 1)
    zeros = init_heads(own, jax.random.key(0), jnp.float32)
    heads = Heads(perturbed(zeros, 0.05, 5), own)
    cut = stree_jax.shard(drafter, mesh)
    both = (drafter, model), (cut, stree_jax.shard(model, mesh))
    sampled = {"sampling": stree_jax.Sampling(temperature=1.0, top_k=20), "n": 2}
    words = {"stop_tokens": (5, 9), "min_new_tokens": 2, "logprobs": 2}
    yield "plain", *({"drafter": None},) * 2
    yield "model, cut", *({"drafter": d, "tree": "E"} for d in (drafter, cut))
    yield "model, whole", *({"drafter": drafter, "tree": "E"},) * 2
    yield "beam", *({"drafter": d, "tree": "beam:2x3"} for d in (drafter, cut))
    yield "heads", *({"drafter": heads, "tree": "chain:2"},) * 2
    yield (
        "staged",
        *({"drafter": Staged(d, m), "tree": "A"} for d, m in both),
    )
    yield "auto, lookup", *({"drafter": "lookup"},) * 2
    yield "auto, model", *({"drafter": d} for d in (drafter, cut))
    yield "sampled", *({"drafter": d, "tree": "E", **sampled} for d in (drafter, cut))
    yield (
        "mss",
        *(
            {"drafter": d, "tree": "E", "rule": "mss", **sampled}
            for d in (drafter, cut)
        ),
    )
    yield "stops", *({"drafter": d, "tree": "E", **words} for d in (drafter, cut))


def check_drafters(mesh, family):
    """Compares every drafter and kind of request on a hybrid."""
    well, model = True, random_model(FAMILIES[family], 1)
    on = mesh_of(mesh)
    cut, asked = stree_jax.shard(model, on), prompts(model.config, 4)
    for name, one, many in drafters(model, on):
        want = stree_jax.generate(model, asked, max_new_tokens=NEW, **one)
        got = stree_jax.generate(cut, asked, max_new_tokens=NEW, **many)
        same = got.tokens == want.tokens
        calls = f"{want.target_calls.sum()} {got.target_calls.sum()}"
        print(f"{family}: {name:13} {mesh} {same} calls {calls}", flush=True)
        well &= same
    return well & check_turns(model, cut, asked)


def check_mtp(mesh, family):
    """Compares drafting with the target's own MTP layers, the default drafter."""
    model, well = random_model(FAMILIES[family], 1), True
    asked, cut = prompts(model.config, 4), stree_jax.shard(model, mesh_of(mesh))
    plain = stree_jax.generate(model, asked, max_new_tokens=NEW, drafter=None)
    for tree in ("chain:3", "auto:1,4,8"):
        options = {"max_new_tokens": NEW, "tree": tree}
        one, many = (stree_jax.generate(m, asked, **options) for m in (model, cut))
        same = one.tokens == many.tokens == plain.tokens
        print(f"{family}: mtp, {tree} {mesh} {same}", flush=True)
        well &= same
    return well


def check_turns(model, cut, asked):
    """Compares conversations that continue from a cached state."""
    texts = []
    for one in (model, cut):
        first = stree_jax.generate(
            one, asked, max_new_tokens=3, keep_past=True, drafter=None
        )
        new = [[7, 8]] * len(asked)
        second = stree_jax.generate(
            one,
            new,
            max_new_tokens=3,
            past=first.past,
            take_past=True,
            drafter=None,
        )
        texts.append(first.tokens + second.tokens)
    print(f"turns {texts[0] == texts[1]}", flush=True)
    return texts[0] == texts[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--meshes", nargs="+", default=list(MESHES))
    parser.add_argument("--drafters", action="store_true")
    args = parser.parse_args()
    well = [check_family(name, args.meshes) for name in args.families]
    if args.drafters:
        for mesh in args.meshes:
            well += [check_drafters(mesh, family) for family in HYBRIDS]
            well += [check_mtp(mesh, family) for family in WITH_MTP]
    return 0 if all(well) else 1


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    sys.exit(main())
