"""MiniMax-01 in float64 NumPy.

The recomputation follows the equations token by token, reads raw tensors, and shares no
code with the library. Every step is a method, so that a test can plant a mistake by
replacing one.
"""

import json

import numpy as np
from safetensors.torch import load_file

from tests.support.qwen import sigmoid, silu

# Prefixes of the factors of a residual sum in published files, and in transformers.
PREFIXES = {
    "linear": ("layernorm_linear_attention", "linear_attn"),
    "full": ("layernorm_full_attention", "full_attn"),
    "mlp": ("layernorm_mlp", "mlp"),
}


class Recomputed:
    """A checkpoint's model in float64.

    Attributes:
      config: fields of config.json, as transformers or the authors write it.
      tensors: tensors by name, in float64.
      kinds: the mixer of every layer, "linear" or "full".
    """

    def __init__(self, directory):
        self.config = c = json.loads((directory / "config.json").read_text())
        tensors = load_file(directory / "model.safetensors")
        self.tensors = {name: x.double().numpy() for name, x in tensors.items()}
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.size = c["head_dim"]
        self.rotated = c.get("rotary_dim", self.size)
        self.theta = (c.get("rope_parameters") or c)["rope_theta"]
        self.window = c.get("sliding_window")
        if "attn_type_list" in c:
            self.kinds = [("linear", "full")[i] for i in c["attn_type_list"]]
        else:
            self.kinds = [kind.partition("_")[0] for kind in c["layer_types"]]
        self.norms_stream = c.get("postnorm", c["model_type"] == "minimax")

    def __getitem__(self, name):
        return self.tensors[f"{name}.weight"]

    # The model

    def logits(self, tokens):
        h = self["model.embed_tokens"][tokens]
        for i, kind in enumerate(self.kinds):
            h = self.layer(h, f"model.layers.{i}.", i, kind)
        head = "lm_head" if "lm_head.weight" in self.tensors else "model.embed_tokens"
        return self.block_norm(h, "model.norm") @ self[head].T

    def layer(self, h, prefix, i, kind):
        u, own = self.block_norm(h, f"{prefix}input_layernorm"), f"{prefix}self_attn."
        y = self.lightning(u, own, i) if kind == "linear" else self.attention(u, own)
        h = self.added(self.stream(h, u), y, kind)
        u = self.block_norm(h, f"{prefix}post_attention_layernorm")
        y = self.experts(u, f"{prefix}block_sparse_moe")
        return self.added(self.stream(h, u), y, "mlp")

    def normed(self, x, eps):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)

    def block_norm(self, x, name):
        return self.normed(x, self.config["rms_norm_eps"]) * self[name]

    def stream(self, h, u):
        return u if self.norms_stream else h

    def factors(self, kind):
        old, new = PREFIXES[kind]
        c = self.config
        return [
            c.get(f"{new}_{letter}_factor", c.get(f"{old}_{letter}"))
            for letter in ("alpha", "beta")
        ]

    def added(self, stream, y, kind):
        alpha, beta = self.factors(kind)
        return alpha * stream + beta * y

    # Lightning attention

    def lightning(self, u, p, i):
        q, k, v = self.cut(self.activation(u @ self[f"{p}qkv_proj"].T))
        y = self.recurrence(q, k, v, self.slopes(i))
        y = self.output_norm(y.reshape(len(u), -1), self[f"{p}norm"])
        y = self.gated(y, u @ self[f"{p}output_gate"].T)
        return y @ self[f"{p}out_proj"].T

    def activation(self, qkv):
        return silu(qkv)

    def cut(self, qkv):
        return np.split(qkv.reshape(len(qkv), self.heads, -1), 3, axis=-1)

    def slopes(self, i):
        slopes = 2.0 ** (-8 * np.arange(1, self.heads + 1) / self.heads)
        return slopes * self.layer_factor(i)

    def layer_factor(self, i):
        return 1 - i / (len(self.kinds) - 1 + 1e-5) + 1e-5

    def recurrence(self, q, k, v, slopes):
        state, y = np.zeros((self.heads, self.size, self.size)), []
        kept = np.exp(-slopes)[:, None, None]
        for t in range(len(q)):
            before, state = state, kept * state + v[t][..., None] * k[t][:, None]
            y.append(self.read(state, before, q[t]))
        return np.stack(y)

    def read(self, state, before, q):
        return np.einsum("hvk,hk->hv", state, q)

    def output_norm(self, y, scale):
        return self.normed(y, 1e-6) * scale

    def gated(self, y, gate):
        return y * sigmoid(gate)

    # Attention

    def attention(self, u, p):
        n, repeats = len(u), self.heads // self.kv_heads
        q, k, v = (u @ self[f"{p}{x}_proj"].T for x in "qkv")
        q, k, v = (x.reshape(n, -1, self.size) for x in (q, k, v))
        q, k = self.turned(q), self.turned(k)
        k, v = (np.repeat(x, repeats, axis=1) for x in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) * self.size**-0.5
        scores = np.where(self.seen(n), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        y = np.einsum("hts,shd->thd", weights, v)
        return y.reshape(n, -1) @ self[f"{p}o_proj"].T

    def seen(self, n):
        back = np.arange(n)[:, None] - np.arange(n)[None]
        return (back >= 0) & (back < (self.window or n))

    def turned(self, x):
        """Rotates the first channels of every head, in halves."""
        first, rest = x[..., : self.rotated], x[..., self.rotated :]
        half = self.rotated // 2
        angle = np.arange(len(x))[:, None] / self.theta ** (np.arange(half) / half)
        z = (first[..., :half] + 1j * first[..., half:]) * np.exp(1j * angle)[:, None]
        return np.concatenate([z.real, z.imag, rest], axis=-1)

    # Experts

    def experts(self, u, p):
        logits = u @ self[f"{p}.gate"].T
        weight = self.weights(logits)
        out = np.zeros_like(u)
        for e in range(logits.shape[1]):
            out = out + weight[:, e : e + 1] * self.mlp(u, f"{p}.experts.{e}")
        return out

    def weights(self, logits):
        """Returns the weight [n, E] of each expert, 0 if it is not used."""
        score = self.router(logits)
        least = np.sort(score, axis=-1)[:, -self.config["num_experts_per_tok"], None]
        return self.normalized(np.where(score >= least, score, 0.0))

    def router(self, logits):
        score = np.exp(logits - logits.max(-1, keepdims=True))
        return score / score.sum(-1, keepdims=True)

    def normalized(self, weight):
        return weight / weight.sum(-1, keepdims=True)

    def mlp(self, u, p):
        gate, up, down = (self[f"{p}.w{i}"].T for i in (1, 3, 2))
        return (silu(u @ gate) * (u @ up)) @ down
