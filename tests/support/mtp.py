"""A tiny Nemotron-H checkpoint with MTP layers, and those layers in float64 NumPy.

transformers has no class for the layers. The recomputation follows the equations, reads
raw tensors, and shares no code with the library. The target's hidden states are those
of transformers in float64.
"""

import json

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import NemotronHForCausalLM

from tests.support.hf_checkpoints import NEMOTRON_MOE, VOCAB, nemotron

D, HEADS, KV_HEADS, HEAD_DIM, EPS = 32, 4, 2, 6, 1e-4
LATENT, SHARED, HIDDEN, EXPERTS = 12, 28, 20, 12
KINDS, FIRST, LAST = ["attention", "moe"], "mtp.layers.0.", "mtp.layers.1."
OUTPUTS = tuple(
    f"{module}_proj.weight" for module in ("out", "o", "latent", "shared_experts.down")
)
OPTIONS = NEMOTRON_MOE | {"moe_latent_size": LATENT, "num_nextn_predict_layers": 1}


def write(directory):
    """Writes a checkpoint whose MTP layers sometimes predict the target's next token.

    For the target and the layers, the next token mostly depends on the token before it.
    All other weights are large enough that a mistake changes the logits.
    """
    nemotron(**OPTIONS).save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(OUTPUTS):
            tensors[name] *= 0.4
    tensors["backbone.embeddings.weight"] *= D**0.5
    layers = mtp_tensors()
    layers[f"{LAST}final_layernorm.weight"] += tensors["backbone.norm_f.weight"] - 1
    save_file(tensors | layers, file, {"format": "pt"})
    config = directory / "config.json"
    values = json.loads(config.read_text()) | {"mtp_layers_block_type": KINDS}
    config.write_text(json.dumps(values))
    return directory


def mtp_tensors(seed=3):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    def matrix(rows, columns, scale=1.0):
        return scale * normal(rows, columns) * columns**-0.5

    def scale(rows=D):
        return 1 + 0.2 * normal(rows)

    mixer, moe = f"{FIRST}mixer.", f"{LAST}mixer."
    kv = KV_HEADS * HEAD_DIM
    norms = (FIRST + "enorm", FIRST + "hnorm", FIRST + "norm", LAST + "norm")
    tensors = {f"{name}.weight": scale() for name in norms}
    tensors |= {
        f"{LAST}final_layernorm.weight": scale(),
        f"{FIRST}eh_proj.weight": matrix(D, 2 * D, 0.4) + torch.eye(D, 2 * D),
        f"{mixer}q_proj.weight": matrix(HEADS * HEAD_DIM, D, 2.0),
        f"{mixer}k_proj.weight": matrix(kv, D, 2.0),
        f"{mixer}v_proj.weight": matrix(kv, D),
        f"{mixer}o_proj.weight": matrix(D, HEADS * HEAD_DIM, 0.5),
        f"{moe}gate.weight": matrix(EXPERTS, D),
        f"{moe}gate.e_score_correction_bias": 0.5 * normal(EXPERTS),
        f"{moe}fc1_latent_proj.weight": matrix(LATENT, D),
        f"{moe}fc2_latent_proj.weight": matrix(D, LATENT, 0.3),
        f"{moe}shared_experts.up_proj.weight": matrix(SHARED, D),
        f"{moe}shared_experts.down_proj.weight": matrix(D, SHARED, 0.3),
    }
    for e in range(EXPERTS):
        tensors[f"{moe}experts.{e}.up_proj.weight"] = matrix(HIDDEN, LATENT)
        tensors[f"{moe}experts.{e}.down_proj.weight"] = matrix(LATENT, HIDDEN)
    return tensors


def norm(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def mlp(x, up, down):
    return np.maximum(x @ up.T, 0) ** 2 @ down.T


class Recomputed:
    """The MTP layers of a checkpoint, and its target, in float64."""

    def __init__(self, directory):
        tensors = load_file(directory / "model.safetensors")
        self.tensors = {k: v.double().numpy() for k, v in tensors.items()}
        target = NemotronHForCausalLM.from_pretrained(
            directory, dtype=torch.float64, experts_implementation="eager"
        )
        self.target = target.eval()

    def __getitem__(self, name):
        return self.tensors[f"mtp.layers.{name}.weight"]

    def target_states(self, tokens):
        """Returns the hidden states [n, d] of n tokens, after the final norm."""
        with torch.no_grad():
            found = self.target.model(torch.tensor([tokens])).last_hidden_state
        return found[0].numpy()

    def logits(self, states):
        return states @ self.tensors["lm_head.weight"].T

    def states(self, tokens, previous):
        """Returns the layers' states [n, d] for n tokens and the states [n, d] that
        chose them."""
        embedded = self.tensors["backbone.embeddings.weight"][tokens]
        both = [norm(embedded, self["0.enorm"]), norm(previous, self["0.hnorm"])]
        h = np.concatenate(both, axis=-1) @ self["0.eh_proj"].T
        h = h + self.attention(norm(h, self["0.norm"]))
        h = h + self.experts(norm(h, self["1.norm"]))
        return norm(h, self["1.final_layernorm"])

    def attention(self, u):
        q, k, v = (u @ self[f"0.mixer.{x}_proj"].T for x in "qkv")
        q = q.reshape(-1, HEADS, HEAD_DIM)
        k, v = (x.reshape(-1, KV_HEADS, HEAD_DIM) for x in (k, v))
        out = np.zeros_like(q)
        for t, head in np.ndindex(len(u), HEADS):
            kv = head * KV_HEADS // HEADS
            scores = k[: t + 1, kv] @ q[t, head] * HEAD_DIM**-0.5
            p = np.exp(scores - scores.max())
            out[t, head] = p @ v[: t + 1, kv] / p.sum()
        return out.reshape(len(u), -1) @ self["0.mixer.o_proj"].T

    def experts(self, u):
        bias = self.tensors["mtp.layers.1.mixer.gate.e_score_correction_bias"]
        groups, k = OPTIONS["n_group"], OPTIONS["num_experts_per_tok"]
        score = 1 / (1 + np.exp(-(u @ self["1.mixer.gate"].T)))
        latent, out = u @ self["1.mixer.fc1_latent_proj"].T, []
        for t, wanted in enumerate(score + bias):
            two = np.sort(wanted.reshape(groups, -1), axis=1)[:, -2:].sum(axis=1)
            kept = np.argsort(-two)[: OPTIONS["topk_group"]]
            group = np.arange(EXPERTS) // (EXPERTS // groups)
            order = np.argsort(-np.where(np.isin(group, kept), wanted, -np.inf))[:k]
            weight = score[t, order] / score[t, order].sum()
            each = "1.mixer.experts.{}.{}_proj".format
            y = [
                mlp(latent[t], self[each(e, "up")], self[each(e, "down")])
                for e in order
            ]
            out.append(weight @ np.stack(y) * OPTIONS["routed_scaling_factor"])
        shared = [self[f"1.mixer.shared_experts.{w}_proj"] for w in ("up", "down")]
        return np.stack(out) @ self["1.mixer.fc2_latent_proj"].T + mlp(u, *shared)

    def pairs(self, text):
        """Returns the layers' input for a text: tokens and the states that chose
        them."""
        return text[1:], self.target_states(text[:-1])

    def along(self, pairs, path):
        """Returns the layers' states [n, d] for the pairs of a text, then for draft
        tokens."""
        tokens, previous = pairs
        states = self.states(tokens, previous)
        for token in path:
            tokens = [*tokens, token]
            previous = np.concatenate([previous, states[-1:]])
            states = self.states(tokens, previous)
        return states

    def tree(self, text, parents):
        """Returns the tokens of a tree below a text. The children of a node are the
        likeliest next tokens, in order."""
        pairs, paths = self.pairs(text), {0: []}
        for node in range(len(parents)):
            children = [i for i, parent in enumerate(parents) if parent == node]
            if children:
                logits = self.logits(self.along(pairs, paths[node])[-1])
                best = np.argsort(-logits)[: len(children)]
                for child, token in zip(children, best.tolist(), strict=True):
                    paths[child] = [*paths[node], token]
        return [paths[node][-1] if node else text[-1] for node in range(len(parents))]


def prompts(lengths, seed=2):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]
