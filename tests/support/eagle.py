"""Tiny EAGLE drafters as published, and the same drafters in float64 NumPy.

The recomputation follows the equations of the papers, reads raw tensors with the names
of the speculators library, and shares no code with the library. The target's residual
streams are those of the library, which other tests check.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax import models
from stree_jax.models.stack.boundaries import tap_of
from tests.support.tiny import REAL, VOCAB, perturbed

D, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, EPS, THETA = 32, 4, 4, 8, 48, 1e-4, 5e3
ROWS = 40  # of the drafter's head
LAYERS = ("mamba", "mlp", "attention", "mlp", "mamba", "mlp")  # three boundaries
BOUNDARIES = (1, 2, 3)
MASK = 45
LONGEST = 96  # tokens of a text


def target(seed=1):
    """Returns a model whose last token decides much about the next."""
    config = models.ModelConfig(
        vocab_size=VOCAB,
        num_tokens=REAL,
        d_model=D,
        layers=LAYERS,
        norm_eps=1e-4,
        mixers=dict(
            mamba=models.MambaConfig(4, 8, 16),
            attention=models.AttentionConfig(4, 2, 8, rope=models.Rope(1e4, 8)),
            mlp=models.MLPConfig(48),
        ),
    )
    params = models.init_params(config, jax.random.key(seed), jnp.float32)
    params = perturbed(params, 0.2, seed)
    return models.Model(params | {"embedding": 60 * params["embedding"]}, config)


def config(**fields):
    """Returns the fields of a flat config.json."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": D,
        "intermediate_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "vocab_size": VOCAB,
        "draft_vocab_size": ROWS,
        "eagle_aux_hidden_state_layer_ids": list(BOUNDARIES),
        "norm_before_residual": False,
    } | fields


def head_ids(seed=0):
    return np.sort(np.random.default_rng(seed).permutation(REAL)[:ROWS])


def tensors(target, seed=0, *, layers=1, taps=3, width=D, fused=False, extra=()):
    """Returns the tensors of a drafter by name, float32, that often predicts the
    target's next token: it mostly passes on the embedding of the last token.

    Args:
      target: the target.
      seed: seed of the weights.
      layers: number of layers.
      taps: m; 0 for a drafter without a projection.
      width: d. If it is not the target's, the drafter has its own embedding.
      fused: True for EAGLE-2.
      extra: names of further tensors.
    """
    rng, d = np.random.default_rng(seed), width

    def matrix(rows, columns, scale=1.0):
        return scale * rng.normal(size=(rows, columns)) * columns**-0.5

    def scale(n):
        return 1 + 0.3 * rng.normal(size=n)

    head = np.asarray(target.params["lm_head"], np.float64)
    ids, found = head_ids(seed), {}
    table = np.asarray(target.params["embedding"], np.float64) if d == D else 0
    if taps and not fused:
        found["fc.weight"] = matrix(d, taps * D, 0.05)
    for i in range(layers):
        layer, a = f"layers.{i}.", f"layers.{i}.self_attn."
        pairs = 2 * d if i == 0 and not fused else d
        same = matrix(HEADS * HEAD_DIM, pairs, 3.0)
        passed = np.eye(HEADS * HEAD_DIM, pairs) if i == 0 else 0
        found |= {
            f"{a}q_proj.weight": same,
            f"{a}k_proj.weight": same[: KV_HEADS * HEAD_DIM]
            + matrix(KV_HEADS * HEAD_DIM, pairs, 0.3),
            f"{a}v_proj.weight": passed + matrix(KV_HEADS * HEAD_DIM, pairs, 0.2),
            f"{a}o_proj.weight": 2 * np.eye(d, HEADS * HEAD_DIM) * (i == 0)
            + matrix(d, HEADS * HEAD_DIM, 0.3),
            f"{layer}post_attention_layernorm.weight": scale(d),
            f"{layer}mlp.gate_proj.weight": matrix(HIDDEN, d),
            f"{layer}mlp.up_proj.weight": matrix(HIDDEN, d),
            f"{layer}mlp.down_proj.weight": matrix(d, HIDDEN, 0.2),
        }
        if not (fused and i == 0):
            found[f"{layer}input_layernorm.weight"] = scale(d)
    if fused:
        found["fc.weight"] = np.eye(d, 2 * d) + matrix(d, 2 * d, 0.1)
    else:
        found["layers.0.hidden_norm.weight"] = scale(d)
        found["norm.weight"] = scale(d)
        if d == D:
            found["norm.weight"] = np.asarray(target.params["norm"]["scale"])
        rows = head[ids] if d == D else matrix(ROWS, d)
        found["lm_head.weight"] = rows + matrix(ROWS, d, 0.05)
    more = {
        "input_norm.weight": scale(taps * D),
        **{f"fc_norm.{i}.weight": scale(D) for i in range(taps)},
        "layers.0.self_attn.q_norm.weight": scale(HEAD_DIM),
        "layers.0.self_attn.k_norm.weight": scale(HEAD_DIM),
        "embed_tokens.weight": table + matrix(VOCAB, d, d**0.5),
        "mask_hidden": rng.normal(size=(1, 1, taps * D)),
        "fc.bias": 0.1 * rng.normal(size=d),
        **{
            f"layers.0.self_attn.{x}_proj.bias": 0.3 * rng.normal(size=n)
            for x, n in (("q", HEADS * HEAD_DIM), ("k", KV_HEADS * HEAD_DIM))
            + (("v", KV_HEADS * HEAD_DIM), ("o", d))
        },
    }
    found |= {name: x for name, x in more.items() if name.startswith(tuple(extra))}
    found = {name: x.astype(np.float32) for name, x in found.items()}
    if not fused:
        found["d2t"] = (ids - np.arange(ROWS)).astype(np.int64)
        found["t2d"] = np.isin(np.arange(VOCAB), ids)
    return found


def rms(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * scale


def turned(x, positions):
    """Applies the rotary embedding to x [n, heads, h]."""
    h = x.shape[-1]
    angle = positions[:, None, None] / THETA ** (np.arange(0, h, 2) / h)
    left, right = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


@partial(jax.jit, static_argnames="taps")
def _read(target, tokens, taps):
    """Returns hidden states and streams of a text."""
    c, n = target.config, tokens.shape[1]
    state = models.init_state(c, 1, n, jnp.float32)
    nodes = models.chain_nodes(1, n, c.conv_taps)
    return models.forward_tapped(target, state, tokens, nodes, taps=taps)[:2]


class Recomputed:
    """A drafter in float64.

    Attributes:
      w: the tensors by name.
      options: the fields of the config.
      target: the target, whose streams and arrays are used.
    """

    def __init__(self, tensors, options, target):
        self.w = {n: np.asarray(x, np.float64) for n, x in tensors.items()}
        self.options, self.target = options, target
        params = target.params
        embedding = self.w.get("embed_tokens.weight", params["embedding"])
        self.embedding = np.asarray(embedding, np.float64)
        self.head = np.asarray(self.w.get("lm_head.weight", params["lm_head"]))
        self.fused = "layers.0.input_layernorm.weight" not in self.w

    def streams(self, text):
        """Returns the target's streams [n, m dt] of a text, or its hidden states."""
        ids = self.options.get("eagle_aux_hidden_state_layer_ids", ())
        taps = tuple(tap_of(self.target.config, b) for b in ids)
        padded = jnp.asarray([[*text, *[0] * (LONGEST - len(text))]], jnp.int32)
        hidden, tapped = _read(self.target, padded, taps)
        no_taps = self.fused or not self.options.get("use_aux_hidden_state", True)
        used = (hidden,) if no_taps else tapped
        found = np.concatenate([np.asarray(x[0], np.float64) for x in used], -1)
        return found[: len(text)]

    def project(self, z):
        """Returns u [n, d] of streams z [n, m dt]."""
        if "input_norm.weight" in self.w:
            z = rms(z, self.w["input_norm.weight"])
        if "fc_norm.0.weight" in self.w:
            each = np.split(z, z.shape[1] // D, axis=1)
            norms = (self.w[f"fc_norm.{i}.weight"] for i in range(len(each)))
            z = np.concatenate([rms(*x) for x in zip(each, norms, strict=True)], 1)
        if self.fused or "fc.weight" not in self.w:
            return z
        return z @ self.w["fc.weight"].T + self.w.get("fc.bias", 0)

    def layer(self, i, x, mask, positions):
        """Returns the attention's output of layer i for inputs x [n, columns]."""
        w, at = self.w, f"layers.{i}.self_attn."

        def heads(name):
            y = x @ w[f"{at}{name}_proj.weight"].T + w.get(f"{at}{name}_proj.bias", 0)
            y = y.reshape(len(x), -1, HEAD_DIM)
            norm = f"{at}{name}_norm.weight"
            return rms(y, w[norm]) if norm in w else y

        q, k = turned(heads("q"), positions), turned(heads("k"), positions)
        k, v = (np.repeat(z, HEADS // KV_HEADS, axis=1) for z in (k, heads("v")))
        scores = np.einsum("thc,shc->hts", q, k) * HEAD_DIM**-0.5
        scores = np.where(mask, scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hts,shc->thc", p / p.sum(-1, keepdims=True), v)
        flat = out.reshape(len(x), -1)
        return flat @ w[f"{at}o_proj.weight"].T + w.get(f"{at}o_proj.bias", 0)

    def mlp(self, i, y):
        w, m = self.w, f"layers.{i}.mlp."
        x = rms(y, w[f"layers.{i}.post_attention_layernorm.weight"])
        gate = x @ w[f"{m}gate_proj.weight"].T
        up = gate / (1 + np.exp(-gate)) * (x @ w[f"{m}up_proj.weight"].T)
        return y + up @ w[f"{m}down_proj.weight"].T

    def states(self, tokens, u):
        """Returns the vectors handed down [n, d] for a chain of n pairs."""
        n, w = len(tokens), self.w
        positions, mask = np.arange(n), np.tril(np.ones((n, n), bool))
        if window := self.options.get("sliding_window"):
            mask &= positions[:, None] - positions[None] < window
        e = self.embedding[tokens]
        if self.fused:
            before = np.concatenate([e, u], 1) @ w["fc.weight"].T + w.get("fc.bias", 0)
            x = before
        else:
            g = rms(u, w["layers.0.hidden_norm.weight"])
            e = rms(e, w["layers.0.input_layernorm.weight"])
            x = np.concatenate([e, g], 1)
            before = g if self.options.get("norm_before_residual") else u
        y = self.mlp(0, before + self.layer(0, x, mask, positions))
        i = 1
        while (norm := f"layers.{i}.input_layernorm.weight") in w:
            y = self.mlp(i, y + self.layer(i, rms(y, w[norm]), mask, positions))
            i += 1
        return rms(y, w["norm.weight"]) if self.options.get("norm_output") else y

    def logits(self, handed):
        """Returns the logits [n, V] of vectors that were handed down."""
        if "norm.weight" in self.w and not self.options.get("norm_output"):
            handed = rms(handed, self.w["norm.weight"])
        found = handed @ self.head.T
        if "d2t" not in self.w:
            return found
        whole = np.full((len(handed), VOCAB), -np.inf)
        whole[:, np.arange(ROWS) + self.w["d2t"].astype(int)] = found
        return whole

    def pairs(self, text):
        """Returns the drafter's input for a text: tokens and their u."""
        return text[1:], self.project(self.streams(text[:-1]))

    def along(self, pairs, path):
        """Returns the vectors [n, d] of the pairs of a text, then of draft tokens."""
        tokens, u = pairs
        states = self.states(tokens, u)
        for token in path:
            tokens, u = [*tokens, token], np.concatenate([u, states[-1:]])
            states = self.states(tokens, u)
        return states

    def levels(self, text, count):
        """Returns the logits [count, V] of all levels of a P-EAGLE drafter."""
        tokens, u = self.pairs(text)
        slots = count - 1
        masked = self.project(self.w["mask_hidden"].reshape(1, -1))
        u = np.concatenate([u, *[masked] * slots])
        mask = self.options.get("mask_token_id", MASK)
        states = self.states([*tokens, *[mask] * slots], u)
        return self.logits(states[-count:])

    def tree(self, text, parents):
        """Returns the tokens of a tree below a text. The children of a node are the
        likeliest next tokens, in order."""
        paths, levels = {0: []}, None
        pairs = self.pairs(text)
        if "mask_hidden" in self.w:
            levels = self.levels(text, len(parents))
        for node in range(len(parents)):
            children = [i for i, parent in enumerate(parents) if parent == node]
            if children:
                if levels is None:
                    logits = self.logits(self.along(pairs, paths[node])[-1:])[0]
                else:
                    logits = levels[len(paths[node])]
                best = np.argsort(-logits[:REAL])[: len(children)]
                for child, token in zip(children, best.tolist(), strict=True):
                    paths[child] = [*paths[node], token]
        return [paths[node][-1] if node else text[-1] for node in range(len(parents))]
