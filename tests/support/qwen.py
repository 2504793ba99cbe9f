"""Qwen3-Next and Qwen3.5 with their MTP layers: tiny checkpoints, and the models in
float64 NumPy.

transformers has no class for the MTP layers. The recomputation follows the equations
token by token, reads raw tensors, and shares no code with the library. Every step is a
method, so that a test can plant a mistake by replacing one.
"""

import json
from functools import cache

import jax.numpy as jnp
import numpy as np
import torch
from safetensors.torch import load_file, save_file

import stree_jax
from stree_jax import models
from stree_jax.models import extend, init_state, logits_of
from tests.support import hf_checkpoints as hf
from tests.support.hf_checkpoints import VOCAB

MTP = "mtp.layers.0."


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.logaddexp(0, x)


class Recomputed:
    """A checkpoint's model in float64.

    Attributes:
      config: fields of the language model.
      tensors: tensors by name, in float64. Names begin with "model.", "mtp." or
        "lm_head.".
    """

    def __init__(self, directory):
        config = json.loads((directory / "config.json").read_text())
        self.config = c = config.get("text_config", config)
        tensors = {}
        for name, tensor in load_file(directory / "model.safetensors").items():
            name = name.replace("model.language_model.", "model.")
            tensors[name] = tensor.double().numpy()
        self.tensors = tensors
        self.heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.head_dim, self.eps = c["head_dim"], c["rms_norm_eps"]
        self.keys, self.values = c["linear_num_key_heads"], c["linear_num_value_heads"]
        self.sizes = c["linear_key_head_dim"], c["linear_value_head_dim"]
        rope = c.get("rope_parameters") or c
        self.theta, self.share = rope["rope_theta"], rope["partial_rotary_factor"]

    def __getitem__(self, name):
        return self.tensors[f"{name}.weight"]

    # The model

    def logits(self, states):
        head = "lm_head" if "lm_head.weight" in self.tensors else "model.embed_tokens"
        return states @ self[head].T

    def target_states(self, tokens):
        """Returns the states [n, d] of n tokens, after the final norm."""
        return self.block_norm(self.streams(tokens), "model.norm")

    def streams(self, tokens):
        h = self["model.embed_tokens"][tokens]
        for i in range(self.config["num_hidden_layers"]):
            h = self.layer(h, f"model.layers.{i}.")
        return h

    def layer(self, h, prefix):
        u = self.block_norm(h, f"{prefix}input_layernorm")
        attends = f"{prefix}self_attn.q_proj.weight" in self.tensors
        mixed = self.attention(u, prefix) if attends else self.delta(u, prefix)
        h = h + mixed
        u = self.block_norm(h, f"{prefix}post_attention_layernorm")
        has_experts = f"{prefix}mlp.gate.weight" in self.tensors
        second = self.experts if has_experts else self.mlp
        return h + second(u, f"{prefix}mlp")

    def normed(self, x, eps):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)

    def scale(self, name):
        return 1 + self[name]

    def block_norm(self, x, name):
        return self.normed(x, self.eps) * self.scale(name)

    # Gated DeltaNet

    def delta(self, u, prefix):
        prefix = f"{prefix}linear_attn."
        q, k, v, z, b, a = self.projected(u, prefix)
        joined = np.concatenate([x.reshape(len(u), -1) for x in (q, k, v)], axis=-1)
        joined = self.conv(joined, self[f"{prefix}conv1d"][:, 0])
        dk, dv = self.sizes
        q, k, v = np.split(joined, np.cumsum([self.keys * dk] * 2), axis=-1)
        q, k = (x.reshape(len(u), self.keys, dk) for x in (q, k))
        v = v.reshape(len(u), self.values, dv)
        q, k = self.query(q), self.key(k)
        q, k = (self.for_value_heads(x) for x in (q, k))
        decay, beta = self.decay(a, prefix), self.beta(b)
        y = self.recurrence(q, k, v, decay, beta)
        y = self.output_norm(y, z, self.output_scale(prefix))
        return y.reshape(len(u), -1) @ self[f"{prefix}out_proj"].T

    def projected(self, u, prefix):
        """Returns q, k [n, keys, dk], v, z [n, values, dv], and b, a [n, values]."""
        n, (dk, dv), ratio = len(u), self.sizes, self.values // self.keys
        if f"{prefix}in_proj_qkv.weight" in self.tensors:
            qkv, z, b, a = (u @ self[f"{prefix}in_proj_{x}"].T for x in self.parts())
            q, k, v = np.split(qkv, np.cumsum([self.keys * dk] * 2), axis=-1)
        else:
            each = (u @ self[f"{prefix}in_proj_qkvz"].T).reshape(n, self.keys, -1)
            q, k, v, z = np.split(each, np.cumsum([dk, dk, ratio * dv]), axis=-1)
            both = (u @ self[f"{prefix}in_proj_ba"].T).reshape(n, self.keys, -1)
            b, a = self.gates(both, ratio)
        q, k = (x.reshape(n, self.keys, dk) for x in (q, k))
        v, z = (x.reshape(n, self.values, dv) for x in (v, z))
        return q, k, v, z, b.reshape(n, -1), a.reshape(n, -1)

    def parts(self):
        return "qkv", "z", "b", "a"

    def gates(self, both, ratio):
        return both[..., :ratio], both[..., ratio:]

    def conv(self, x, weight):
        taps = weight.shape[1]
        padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
        out = sum(padded[i : i + len(x)] * weight[:, i] for i in range(taps))
        return self.conv_activation(out)

    def conv_activation(self, x):
        return silu(x)

    def unit(self, x):
        return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)

    def query(self, q):
        return self.unit(q) * self.sizes[0] ** -0.5

    def key(self, k):
        return self.unit(k)

    def for_value_heads(self, x):
        return np.repeat(x, self.values // self.keys, axis=1)

    def decay(self, a, prefix):
        step = softplus(a + self.tensors[f"{prefix}dt_bias"])
        return np.exp(-np.exp(self.tensors[f"{prefix}A_log"]) * step)

    def beta(self, b):
        return sigmoid(b)

    def recurrence(self, q, k, v, decay, beta):
        """Returns o [n, values, dv] of S = decay S + beta (v - decay S k) k^T, o =
        S q."""
        state = np.zeros((self.values, *self.sizes[::-1]))
        out = np.zeros_like(v)
        for t in range(len(q)):
            state = decay[t, :, None, None] * state
            lacking = v[t] - self.read(state, k[t])
            state = state + np.einsum("h,hv,hk->hvk", beta[t], lacking, k[t])
            out[t] = np.einsum("hvk,hk->hv", state, q[t])
        return out

    def read(self, state, k):
        return np.einsum("hvk,hk->hv", state, k)

    def output_scale(self, prefix):
        return self[f"{prefix}norm"]

    def output_norm(self, y, z, scale):
        return self.normed(y, self.eps) * scale * self.output_gate(z)

    def output_gate(self, z):
        return silu(z)

    # Attention

    def attention(self, u, prefix):
        prefix, n = f"{prefix}self_attn.", len(u)
        q, gate = self.query_and_gate(self.linear(u, f"{prefix}q_proj"))
        k, v = (self.linear(u, f"{prefix}{x}_proj") for x in "kv")
        k, v = (x.reshape(n, self.heads[1], self.head_dim) for x in (k, v))
        q = self.turned(self.normed(q, self.eps) * self.scale(f"{prefix}q_norm"))
        k = self.turned(self.normed(k, self.eps) * self.scale(f"{prefix}k_norm"))
        k, v = (np.repeat(x, self.heads[0] // self.heads[1], axis=1) for x in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) * self.head_dim**-0.5
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        y = np.einsum("hts,shd->thd", p / p.sum(-1, keepdims=True), v)
        y = y.reshape(n, -1) * self.attention_gate(gate.reshape(n, -1))
        return self.linear(y, f"{prefix}o_proj")

    def linear(self, u, name):
        return u @ self[name].T + self.tensors.get(f"{name}.bias", 0)

    def query_and_gate(self, both):
        both = both.reshape(len(both), self.heads[0], 2 * self.head_dim)
        return both[..., : self.head_dim], both[..., self.head_dim :]

    def attention_gate(self, gate):
        return sigmoid(gate)

    def turned(self, x):
        """Rotates the first channels of heads x [n, heads, head_dim]."""
        dim = int(self.head_dim * self.share)
        angles = np.outer(
            np.arange(len(x)), self.theta ** -(np.arange(0, dim, 2) / dim)
        )
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second, rest = np.split(x, [dim // 2, dim], axis=-1)
        turned = first * cos - second * sin, second * cos + first * sin
        return np.concatenate([*turned, rest], axis=-1)

    # MLP and experts

    def mlp(self, u, prefix):
        gate, up, down = (self[f"{prefix}.{w}_proj"] for w in ("gate", "up", "down"))
        return self.gated(u, gate, up) @ down.T

    def gated(self, u, gate, up):
        return silu(u @ gate.T) * (u @ up.T)

    def expert(self, prefix, e):
        """Returns gate, up and down of an expert."""
        name = f"{prefix}.experts.gate_up_proj"
        if name in self.tensors:
            gate, up = np.split(self.tensors[name][e], 2)
            return gate, up, self.tensors[f"{prefix}.experts.down_proj"][e]
        names = (f"{prefix}.experts.{e}.{w}_proj" for w in ("gate", "up", "down"))
        return tuple(self[name] for name in names)

    def experts(self, u, prefix):
        y = np.zeros_like(u)
        for t, scores in enumerate(u @ self[f"{prefix}.gate"].T):
            p = np.exp(scores - scores.max())
            p = p / p.sum()
            best = np.argsort(-scores)[: self.config["num_experts_per_tok"]]
            for e, weight in zip(best, self.weights(p[best]), strict=True):
                gate, up, down = self.expert(prefix, e)
                y[t] += weight * (self.gated(u[t], gate, up) @ down.T)
        return y + self.shared(u, prefix)

    def weights(self, p):
        return p / p.sum()

    def shared(self, u, prefix):
        gate = sigmoid(u @ self[f"{prefix}.shared_expert_gate"].T)
        return gate * self.mlp(u, f"{prefix}.shared_expert")

    # MTP layers

    def states(self, tokens, previous):
        """Returns the MTP layers' states [n, d] for n tokens and the states [n, d] that
        chose them."""
        h = self.mtp_inputs(self["model.embed_tokens"][tokens], previous)
        h = self.layer(h @ self["mtp.fc"].T, MTP)
        return self.block_norm(h, "mtp.norm")

    def mtp_inputs(self, embedded, hidden):
        embedded = self.block_norm(embedded, "mtp.pre_fc_norm_embedding")
        hidden = self.block_norm(hidden, "mtp.pre_fc_norm_hidden")
        return np.concatenate([embedded, hidden], axis=-1)

    def mtp_logits(self, text):
        """Returns the logits [n-1, V] of the MTP layers for a text of n tokens."""
        states = self.states(text[1:], self.target_states(text[:-1]))
        return self.logits(states)


# Checkpoints with MTP layers


def with_mtp(directory, fused=False, seed=3):
    """Adds MTP layers to a saved one-file checkpoint, with random weights.

    Args:
      directory: the checkpoint.
      fused: True to store the matrices of all experts of the MTP layers as one tensor.
      seed: seed of the weights.
    """
    generator = torch.Generator().manual_seed(seed)
    file = directory / "model.safetensors"
    tensors, layers = load_file(file), {}
    prefix = "model.language_model."
    if f"{prefix}norm.weight" not in tensors:
        prefix = "model."
    like = f"{prefix}layers.3."  # the layer with attention

    def normal(*shape):
        noise = torch.randn(shape, generator=generator)
        # Scales of norms have few bits; see `hf_checkpoints.randomize_offset`.
        rounded = torch.round(256 * 0.3 * noise) / 256
        return noise * shape[-1] ** -0.5 if len(shape) > 1 else rounded

    for name, tensor in tensors.items():
        if name.startswith(like):
            layers[MTP + name.removeprefix(like)] = normal(*tensor.shape)
    d = tensors[f"{prefix}embed_tokens.weight"].shape[1]
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        layers[f"mtp.{name}.weight"] = normal(d)
    layers["mtp.fc.weight"] = normal(d, 2 * d)
    if fused:
        layers = fuse(layers)
    save_file(tensors | layers, file, {"format": "pt"})
    config = directory / "config.json"
    values = json.loads(config.read_text())
    values.get("text_config", values)["mtp_num_hidden_layers"] = 1
    config.write_text(json.dumps(values))
    return directory


def fuse_experts(directory, prefix):
    """Fuses the experts of the tensors of a one-file checkpoint whose names begin with
    `prefix`; see `fuse`."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    chosen = {n: t for n, t in tensors.items() if n.startswith(prefix)}
    others = {n: t for n, t in tensors.items() if n not in chosen}
    save_file(others | fuse(chosen), file, {"format": "pt"})


def fuse(tensors):
    """Returns the tensors with one for all experts of a layer, as Qwen3.5 has them."""
    tensors, found = dict(tensors), {}
    for name in [name for name in tensors if ".experts." in name]:
        prefix, _, rest = name.partition(".experts.")
        number, module, _ = rest.split(".")
        found.setdefault(prefix, {})[int(number), module] = tensors.pop(name)
    for prefix, each in found.items():
        numbers = sorted({e for e, _ in each})
        both = [torch.cat([each[e, "gate_proj"], each[e, "up_proj"]]) for e in numbers]
        tensors[f"{prefix}.experts.gate_up_proj"] = torch.stack(both)
        down = [each[e, "down_proj"] for e in numbers]
        tensors[f"{prefix}.experts.down_proj"] = torch.stack(down)
    return tensors


def tokens_of(seed, count):
    return np.random.default_rng(seed).integers(0, VOCAB, count)


TOKENS = tokens_of(1, 40)
MAKERS = {
    "qwen3-next": hf.qwen3_next,  # dense layers among experts, grouped projections
    "qwen3-5": lambda: hf.qwen3_5(tie_word_embeddings=True),
    "qwen3-5-moe": hf.qwen3_5_moe,
}


def checkpoints(root):
    """Returns a function: name of a maker -> its checkpoint, with MTP layers.

    Each directory is made once. Copy it before changing it.
    """

    @cache
    def make(name):
        MAKERS[name]().save_pretrained(root / name)
        return with_mtp(root / name)

    return make


# Logits of the library


def score(model, tokens=TOKENS):
    return np.asarray(stree_jax.score(model, tokens[None])[0])


def mtp_score(model, tokens=TOKENS):
    """Returns the logits of a model's MTP layers for a text."""
    size = jnp.asarray([len(tokens) - 1], jnp.int32)
    state = init_state(model.config, 1, len(tokens), jnp.float32)
    ids = jnp.asarray(tokens[None], jnp.int32)
    hidden, _ = extend(model, state, ids[:, :-1], size)
    layers = models.mtp_model(model)
    state = init_state(layers.config, 1, len(tokens), jnp.float32)
    hidden, _ = extend(layers, state, ids[:, 1:], size, hidden)
    return np.asarray(logits_of(layers, hidden)[0])
