"""Kimi-Linear and Ling-3 in float64 NumPy.

The recomputation follows the equations token by token, reads raw tensors, and shares no
code with the library. Every step is a method, so that a test can plant a mistake by
replacing one.
"""

import json

import numpy as np
from safetensors.torch import load_file

from tests.support.qwen import sigmoid, silu, softplus

# Names of Ling's tensors, and those of transformers and of the experts in Kimi-Linear.
OTHER_NAMES = {
    ".word_embeddings.": ".embed_tokens.",
    ".attention.": ".self_attn.",
    ".dense.": ".o_proj.",
    ".expert_bias": ".e_score_correction_bias",
    ".block_sparse_moe.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}


class Recomputed:
    """A checkpoint's model in float64.

    Attributes:
      config: fields of config.json, as transformers writes it.
      tensors: tensors by name, in float64, with the names of Kimi-Linear.
      is_ling: True for Ling-3.
    """

    def __init__(self, directory):
        self.config = c = json.loads((directory / "config.json").read_text())
        self.tensors = {}
        for name, tensor in load_file(directory / "model.safetensors").items():
            for other, ours in OTHER_NAMES.items():
                name = name.replace(other, ours)
            self.tensors[name] = tensor.double().numpy()
        self.is_ling = c["model_type"] == "bailing_hybrid"
        self.eps, self.heads = c["rms_norm_eps"], c["num_attention_heads"]
        self.kda_heads, self.size = c["linear_num_heads"], c["linear_head_dim"]
        self.nope, self.rope = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        self.value, self.rank = c["v_head_dim"], c["kv_lora_rank"]
        self.theta = (c.get("rope_parameters") or {}).get("rope_theta")

    def __getitem__(self, name):
        return self.tensors[f"{name}.weight"]

    # The model

    def logits(self, tokens):
        h = self["model.embed_tokens"][tokens]
        for i in range(self.config["num_hidden_layers"]):
            h = self.layer(h, f"model.layers.{i}.")
        return self.block_norm(h, "model.norm") @ self["lm_head"].T

    def layer(self, h, prefix):
        u, own = self.block_norm(h, f"{prefix}input_layernorm"), f"{prefix}self_attn."
        attends = f"{own}kv_b_proj.weight" in self.tensors
        h = h + (self.mla(u, own) if attends else self.kda(u, own))
        u, own = self.block_norm(h, f"{prefix}post_attention_layernorm"), f"{prefix}mlp"
        has_experts = f"{own}.gate.weight" in self.tensors
        return h + (self.experts(u, own) if has_experts else self.mlp(u, own))

    def normed(self, x, eps):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)

    def block_norm(self, x, name):
        return self.normed(x, self.eps) * self[name]

    # Kimi Delta Attention

    def kda(self, u, p):
        q, k, v = (self.conv(u @ self[f"{p}{x}_proj"].T, p, x) for x in "qkv")
        q, k, v = (x.reshape(len(u), self.kda_heads, -1) for x in (q, k, v))
        decay, beta = (
            self.decay(self.forget(u, p), p),
            self.beta(u @ self[f"{p}b_proj"].T),
        )
        y = self.recurrence(self.query(q), self.key(k), v, decay, beta)
        z = self.gate(u, p).reshape(y.shape)
        y = self.output_norm(y, z, self.output_scale(p))
        return y.reshape(len(u), -1) @ self[f"{p}o_proj"].T

    def conv(self, x, p, letter):
        weight = self.taps(p, letter)
        count = weight.shape[1]
        padded = np.concatenate([np.zeros((count - 1, x.shape[1])), x])
        out = sum(padded[i : i + len(x)] * weight[:, i] for i in range(count))
        return self.conv_activation(out)

    def taps(self, p, letter):
        return self[f"{p}{letter}_conv1d"][:, 0]

    def conv_activation(self, x):
        return silu(x)

    def forget(self, u, p):
        if self.is_ling:
            return u @ self[f"{p}f_proj"].T
        return u @ self[f"{p}f_a_proj"].T @ self[f"{p}f_b_proj"].T

    def gate(self, u, p):
        if self.is_ling:
            return u @ self[f"{p}g_proj"].T
        return u @ self[f"{p}g_a_proj"].T @ self[f"{p}g_b_proj"].T

    def dt_bias(self, p):
        return self.tensors[f"{p}dt_bias"]

    def rate(self, p):
        return np.exp(self.tensors[f"{p}A_log"].reshape(-1, 1))

    def decay(self, f, p):
        """Returns the decays [n, heads, size]."""
        f = (f + self.dt_bias(p)).reshape(len(f), self.kda_heads, self.size)
        return np.exp(self.log_decay(f, self.rate(p)))

    def log_decay(self, f, rate):
        if self.is_ling and self.config["kda_safe_gate"]:
            return self.config["kda_lower_bound"] * sigmoid(rate * f)
        return -rate * softplus(f)

    def beta(self, b):
        return sigmoid(b)

    def unit(self, x):
        return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)

    def query(self, q):
        return self.unit(q) * self.size**-0.5

    def key(self, k):
        return self.unit(k)

    def recurrence(self, q, k, v, decay, beta):
        state, y = np.zeros((self.kda_heads, self.size, self.size)), []
        for t in range(len(q)):
            kept = state * decay[t][:, None]
            added = beta[t][:, None] * (v[t] - self.read(kept, state, k[t]))
            state = kept + added[..., None] * k[t][:, None]
            y.append(np.einsum("hvk,hk->hv", state, q[t]))
        return np.stack(y)

    def read(self, kept, before, k):
        return np.einsum("hvk,hk->hv", kept, k)

    def output_scale(self, p):
        return self[f"{p}o_norm"]

    def output_gate(self, z):
        return sigmoid(z)

    def output_norm(self, y, z, scale):
        return self.normed(y, self.eps) * scale * self.output_gate(z)

    # Latent attention

    def mla(self, u, p):
        n = len(u)
        q = (u @ self[f"{p}q_proj"].T).reshape(n, self.heads, -1)
        q_nope, q_rope = self.cut(q)
        c, shared = self.latent(u @ self[f"{p}kv_a_proj_with_mqa"].T)
        c = self.latent_norm(c, self[f"{p}kv_a_layernorm"])
        k_nope, v = self.expanded(c @ self[f"{p}kv_b_proj"].T)
        q_rope, shared = self.turned(q_rope), self.turned(shared[:, None])
        q = np.concatenate([q_nope, q_rope], axis=-1)
        k = np.concatenate([k_nope, np.repeat(shared, self.heads, axis=1)], axis=-1)
        scores = np.einsum("thd,shd->hts", q, k) * self.softmax_scale()
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        y = np.einsum("hts,shd->thd", weights, v)
        if self.is_ling:
            y = y * self.head_gate(u @ self[f"{p}g_proj"].T)[..., None]
        return y.reshape(n, -1) @ self[f"{p}o_proj"].T

    def cut(self, q):
        return q[..., : self.nope], q[..., self.nope :]

    def latent(self, kv):
        return kv[:, : self.rank], kv[:, self.rank :]

    def latent_norm(self, c, scale):
        return self.normed(c, 1e-6) * scale

    def expanded(self, kv):
        kv = kv.reshape(len(kv), self.heads, -1)
        return kv[..., : self.nope], kv[..., self.nope :]

    def softmax_scale(self):
        return (self.nope + self.rope) ** -0.5

    def turned(self, x):
        """Rotates pairs of neighbouring channels of x [n, heads, rope] in Ling-3."""
        return self.rotated(x) if self.is_ling else x

    def rotated(self, x):
        power = np.arange(0, x.shape[-1], 2) / x.shape[-1]
        angle = np.arange(len(x))[:, None] / (self.theta or 1e4) ** power
        turn = np.exp(1j * angle)[:, None]
        z = (x[..., ::2] + 1j * x[..., 1::2]) * turn
        return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)

    def head_gate(self, g):
        return sigmoid(g)

    # MLPs

    def mlp(self, u, p):
        hidden = silu(u @ self[f"{p}.gate_proj"].T) * (u @ self[f"{p}.up_proj"].T)
        return hidden @ self[f"{p}.down_proj"].T

    def experts(self, u, p):
        score = self.router(u @ self[f"{p}.gate"].T)
        chosen = self.chosen(score + self.tensors[f"{p}.gate.e_score_correction_bias"])
        weight = self.weights(np.where(chosen, self.weighed(score, p), 0.0))
        out = self.shared(u, p)
        for e in range(score.shape[1]):
            out = out + weight[:, e : e + 1] * self.mlp(u, f"{p}.experts.{e}")
        return out

    def router(self, logits):
        return sigmoid(logits)

    def weighed(self, score, p):
        return score

    def chosen(self, score):
        """Returns which experts each token uses, [n, E] bool."""
        c, n = self.config, len(score)
        groups = score.reshape(n, c["num_expert_group"], -1)
        best = self.group_score(groups)
        kept = np.argsort(-best, axis=-1)[:, : c["topk_group"]]
        inside = np.zeros(best.shape, bool)
        np.put_along_axis(inside, kept, True, axis=-1)
        score = np.where(inside[..., None], groups, -np.inf).reshape(n, -1)
        first = np.argsort(-score, axis=-1)[:, : c["num_experts_per_token"]]
        chosen = np.zeros(score.shape, bool)
        np.put_along_axis(chosen, first, True, axis=-1)
        return chosen

    def group_score(self, groups):
        return np.sort(groups, axis=-1)[..., -2:].sum(-1)

    def weights(self, weight):
        if self.config["moe_renormalize"]:
            weight = weight / (weight.sum(-1, keepdims=True) + 1e-20)
        return weight * self.config["routed_scaling_factor"]

    def shared(self, u, p):
        return self.mlp(u, f"{p}.shared_experts")
