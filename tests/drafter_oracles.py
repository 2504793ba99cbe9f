"""Compares `tests.support.drafter_reference` with the makers' own code.

Needs speculators 0.9.0, hs-connectors 0.9.0 and dflash 0.1.0, which are not among the
packages of the tests:

    python -m tests.drafter_oracles             # prints the largest differences
    python -m tests.drafter_oracles --write     # and stores their results for the tests
"""

import argparse
import itertools
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import dflash.model
import numpy as np
import speculators.models.dflash.model_definitions as block_layers
import speculators.models.peagle.core as peagle_core
import torch
from safetensors.torch import load_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.model import SpeculatorModel, SpeculatorModelConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config
from transformers.models.gpt_oss.modeling_gpt_oss import (
    eager_attention_forward as attention_with_sinks,
)

from tests.support import drafter_reference as reference
from tests.support.drafter_cases import (
    BLOCK,
    EAGLE,
    FILE,
    PEAGLE,
    SEED,
    inputs,
    prepared,
)
from tests.support.drafter_params import half_split
from tests.support.published_drafters import (
    LAYOUTS,
    canonical,
    facts_of,
    published_name,
    sizes_of,
    write_drafter,
)


def layer_config(facts, sizes):
    """Returns the config of the layers in the classes of transformers."""
    rope = {"rope_type": "default", "rope_theta": facts.theta}
    if facts.yarn is not None:
        rope |= asdict(facts.yarn) | {"rope_type": "yarn"}
        rope["original_max_position_embeddings"] = rope.pop("original")
    eagle = facts.kind in ("eagle3", "peagle")
    options = {}
    if not eagle:
        window = max((w for w in facts.windows if w is not None), default=None)
        options = {
            "sliding_window": window,
            "use_sliding_window": window is not None,
            "layer_types": [
                "full_attention" if w is None else "sliding_attention"
                for w in facts.windows
            ],
        }
    config = (LlamaConfig if eagle and not sizes.q_norms else Qwen3Config)(
        hidden_size=sizes.d,
        intermediate_size=sizes.hidden,
        num_hidden_layers=facts.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab,
        rms_norm_eps=facts.eps,
        rope_parameters=rope,
        max_position_embeddings=4096,
        **options,
    )
    config._attn_implementation = "eager"
    return config


def model_of(arrays, facts, sizes):
    """Returns the model of `speculators` with the weights, in float64."""
    eagle = facts.kind in ("eagle3", "peagle")
    options = {}
    if eagle:
        options = {
            "eagle_aux_hidden_state_layer_ids": list(facts.boundaries),
            "norm_before_residual": facts.norm_before_residual,
            "norm_output": facts.norm_output,
            "norm_before_fc": sizes.norm_before_fc,
            "fc_norm": sizes.fc_norm,
        }
    else:
        options = {
            "aux_hidden_state_layer_ids": list(facts.boundaries),
            "block_size": facts.slots,
            "sample_from_anchor": facts.from_anchor,
            "sliding_window_non_causal": not any(facts.causal),
        }
    if facts.kind != "eagle3":
        options["mask_token_id"] = facts.mask_id
    if facts.kind == "dspark":
        options |= {"markov_rank": sizes.rank, "markov_head_type": facts.markov}
        options["enable_confidence_head"] = "confidence.weight" in arrays
    if facts.kind == "dflash2":
        options |= {"selector_rank": sizes.rank, "selector_top_k": facts.top_k}
    config = SpeculatorModelConfig.registry[facts.kind](
        transformer_layer_config=layer_config(facts, sizes),
        draft_vocab_size=len(arrays["head"]),
        speculators_config=SpeculatorsConfig(
            algorithm=facts.kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **options,
    )
    return filled(SpeculatorModel.registry[facts.kind](config), arrays)


def filled(model, arrays):
    """Returns the model in float64 with our weights. Sinks become attributes."""
    state = model.double().state_dict()
    for name in [name for name in state if name.startswith("verifier")]:
        state[name] = torch.ones_like(state[name])
    left = {name for name in state if not name.startswith(("verifier", "d2t", "t2d"))}
    for name, values in arrays.items():
        theirs, tensor = published_name(name), torch.tensor(values)
        if name.endswith("sinks"):
            model.layers[int(name.partition(".")[0])].self_attn.sinks = tensor
        elif name != "head_ids":
            state[theirs] = tensor.reshape(state[theirs].shape)
            left.remove(theirs)
    assert not left, left
    model.load_state_dict(state)
    return model.eval()


def block_scores(arrays, facts, sizes, taps, tokens, count):
    """Returns (scores [drafts, D], confidences) of `speculators`, for a block whose
    anchor is tokens[count] and whose drafts are the tokens after it.

    Its rotary pairs are always halves, so the rows of interleaved heads are reordered.
    """
    if facts.interleaved:
        names = [f"{i}.{n}" for i in range(facts.layers) for n in ("q", "k")]
        names += [f"{name}_norm" for name in names]
        moved = {name: half_split(arrays[name], facts.head_dim) for name in names}
        arrays, facts = arrays | moved, replace(facts, interleaved=False)
    model = model_of(arrays, facts, sizes)
    chosen = torch.arange(len(taps))[None] == count
    joined = torch.tensor(taps.reshape(1, len(taps), -1))
    ids, none = torch.tensor(tokens)[None], torch.zeros(1, len(taps), dtype=torch.long)
    final = torch.zeros(1, len(taps), sizes.d).double()
    attention = block_layers.eager_attention_forward
    if any(name.endswith("sinks") for name in arrays):
        attention = attention_with_sinks
    with mock.patch.object(block_layers, "eager_attention_forward", attention):
        hidden, logits, *_ = model._backbone_forward(
            joined, ids, chosen, final, none, None, max_anchors=1
        )
    first = 0 if facts.from_anchor else 1
    hidden, logits = hidden[:, first:], logits[:, first:]
    previous = ids[:, count : count + facts.drafts]
    if facts.kind == "dflash":
        return logits[0].numpy(), np.array([])
    if facts.kind == "dflash2":
        best, scores = model.candidate_selector.select(logits, hidden, previous)
        every = torch.full_like(logits, -torch.inf).scatter(-1, best, scores)
        return every[0].numpy(), np.array([])
    head, sure = model.markov_head, np.array([])
    bias = head.block_bias(prev_token_ids=previous, hidden_states=hidden)
    if model.confidence_head is not None:
        features = torch.cat([hidden, head.prev_embeddings(previous)], -1)
        sure = torch.sigmoid(model.confidence_head(features))[0].numpy()
    return (logits + bias)[0].numpy(), sure


def eagle_scores(arrays, facts, sizes, taps, tokens, count, depth):
    """Returns the logits [depth, D] of `speculators` for the drafts after the pairs
    [:count], if the drafts are the tokens after them."""
    model, seen = model_of(arrays, facts, sizes), []
    model.lm_head.register_forward_hook(lambda *args: seen.append(args[2][0].numpy()))
    joined = torch.tensor(taps.reshape(1, len(taps), -1))
    ids, none = torch.tensor(tokens)[None], torch.zeros(1, len(taps), dtype=torch.long)
    if facts.kind == "eagle3":
        model(joined, ids, none, ttt_steps=depth)
        return np.array([seen[level][count - 1] for level in range(depth)])
    rows = [(n, 0) for n in range(count)] + [(count - 1, k) for k in range(1, depth)]
    rows = tuple(torch.tensor(x) for x in zip(*rows, strict=True))
    final = torch.zeros(1, len(taps), sizes.d).double()
    with mock.patch.object(
        peagle_core, "generate_cod_sample_indices", lambda **_: rows
    ):
        try:
            model(joined, ids, none, verifier_last_hidden_states=final)
        except RuntimeError as error:  # the loss, which comes after the logits
            assert "Triton" in str(error), error
    return seen[0][count - 1 :]


def two_layers(q_norms):
    """Returns the largest difference of EAGLE-3 drafters with two layers of Llama or
    Qwen3, over all combinations of their norms."""
    norms, found = [{}, {"norm_before_fc": True}, {"fc_norm": True}], []
    layouts = "speculators-eagle3", "specforge-eagle3"  # norm_before_residual or not
    for name, norm, output in itertools.product(layouts, norms, (False, True)):
        options = norm | {"norm_output": output, "q_norms": q_norms}
        sizes = sizes_of("eagle3", options | {"eagle3_layers": 2})
        facts = facts_of(LAYOUTS[name], sizes)
        arrays = canonical(LAYOUTS[name], SEED, sizes)
        taps, tokens, count = inputs(facts, sizes)
        theirs = eagle_scores(arrays, facts, sizes, taps, tokens, count, 3)
        read, path = (tokens[:count], taps[:count], 3), tokens[count : count + 3]
        _, ours = reference.eagle_draft(arrays, facts, *read, path=path)
        found.append(difference(theirs, ours))
    return max(found)


def z_lab_tokens(layout, causal, window, root):
    """Returns (states [slots, d], greedy draft tokens) of z-lab's code for a directory,
    and those of the reference."""
    directory = Path(root) / f"{layout} {causal} {window}"
    written = write_drafter(directory, layout, 5, window=window, layers=3)
    facts, arrays = replace(written.facts, causal=(causal,) * 3), written.arrays
    raw = written.config | {"is_causal": causal}
    kind = "DFlash2DraftModel" if facts.kind == "dflash2" else "DFlashDraftModel"
    model = getattr(dflash.model, kind)(Qwen3Config(**raw)).double()
    tensors = load_file(directory / "model.safetensors")
    model.load_state_dict(
        {n.replace("codebook", "codebook.weight"): t for n, t in tensors.items()}
    )
    taps, anchor, n = np.random.default_rng(6).standard_normal((20, 3, 32)), 3, 20
    embed, head = torch.tensor(arrays["embed"]), torch.tensor(arrays["head"])
    states = model.eval()(
        position_ids=torch.arange(n + facts.slots)[None],
        noise_embedding=embed[[anchor] + [facts.mask_id] * (facts.slots - 1)][None],
        target_hidden=torch.tensor(taps.reshape(1, n, -1)),
    )
    tokens = (states[0, 1:] @ head.T).argmax(-1)
    if facts.kind == "dflash2":
        first = torch.tensor([anchor])
        tokens = model.propose(states[:, 1:], first, lambda x: x @ head.T, 0.0)[0][0]
    ours = reference.block_states(arrays, facts, taps, anchor)
    drafts, *_ = reference.draft(arrays, facts, taps, anchor)
    return np.abs(states[0].numpy() - ours).max(), tokens.tolist() == drafts


def difference(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape and (np.isfinite(a) == np.isfinite(b)).all()
    kept = np.isfinite(a)
    return float(np.abs(a[kept] - b[kept]).max()) if kept.any() else 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    stored = {}
    for case in BLOCK + EAGLE + PEAGLE:
        facts, sizes, arrays = prepared(case)
        taps, tokens, count = inputs(facts, sizes)
        if case in BLOCK:
            theirs, sure = block_scores(arrays, facts, sizes, taps, tokens, count)
            path = tokens[count + 1 : count + 1 + facts.drafts]
            _, ours, own = reference.draft(
                arrays, facts, taps[:count], tokens[count], path=path
            )
            worst = max(difference(theirs, ours), difference(sure, own))
        else:
            theirs = eagle_scores(arrays, facts, sizes, taps, tokens, count, 3)
            run = reference.peagle_draft
            options = {}
            if facts.kind == "eagle3":
                run = reference.eagle_draft
                options = {"path": tokens[count : count + 3]}
            _, ours = run(arrays, facts, tokens[:count], taps[:count], 3, **options)
            worst, sure = difference(theirs, ours), np.array([])
        print(f"speculators, {case}: {worst:.1e}")
        stored[case] = {"best": theirs.max(-1).tolist(), "confidence": sure.tolist()}
        stored[case]["row"] = theirs.argmax(-1).tolist()
    for name, q_norms in (("Llama", False), ("Qwen3", True)):
        print(f"speculators, EAGLE-3, two layers, {name}: {two_layers(q_norms):.1e}")
    with tempfile.TemporaryDirectory() as root:
        for layout in [n for n in LAYOUTS if n.startswith("z-lab")]:
            for causal in (False, True):
                for window in (3, 8):
                    worst, equal = z_lab_tokens(layout, causal, window, root)
                    assert equal
                    what = f"causal {causal}, window {window}"
                    print(f"dflash, {layout}, {what}: {worst:.1e}, equal tokens")
    if write:
        FILE.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        main()
