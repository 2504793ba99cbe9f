"""Native and MambaInLlama models recomputed token by token in float64 NumPy.

transformers has no class for these formats. This follows the authors' equations, reads
raw tensors, and shares no code with the library.
"""

import numpy as np


def silu(x):
    return x / (1 + np.exp(-x))


def norm(x, weight, eps, bias=None):
    if bias is not None:
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
    return x if bias is None else x + bias


def grouped_norm(x, weight, groups, eps):
    parts = x.reshape(groups, -1)
    parts = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + eps)
    return parts.reshape(-1) * weight


def conv(history, t, weight, bias):
    """Returns the causal depthwise convolution at t over `history`, then silu."""
    taps = weight.shape[-1]
    total = np.array(bias, float)
    for k in range(taps):
        if (s := t - taps + 1 + k) >= 0:
            total = total + weight[:, 0, k] * history[s]
    return silu(total)


def scan(x, dt, A, B, C, D):
    """Returns y [T, H, P] from x [T, H, P], dt [T, H], B and C [T, H, N], and D
    [H, P]."""
    state = np.zeros((*x.shape[1:], B.shape[-1]))
    out = []
    for t in range(len(x)):
        state = np.exp(dt[t] * A)[:, None, None] * state
        state = state + (dt[t, :, None] * x[t])[..., None] * B[t][:, None, :]
        out.append((state * C[t][:, None, :]).sum(-1) + D * x[t])
    return np.stack(out)


def native_mixer(u, w, ssm):
    inner, P, N = ssm.get("d_ssm", 48), 8, ssm["d_state"]
    G, H = ssm.get("ngroups", 1), ssm.get("d_ssm", 48) // 8
    d_mlp = 48 - inner
    lo, hi = ssm.get("dt_limit", (0, np.inf))
    cuts = np.cumsum([d_mlp, d_mlp, inner, inner + 2 * G * N])
    zxbcdt = u @ w["in_proj.weight"].T + w.get("in_proj.bias", 0)
    z0, x0, z, xBC, dt = np.split(zxbcdt, cuts, axis=-1)
    taps, bias = w["conv1d.weight"], w.get("conv1d.bias", 0)
    mixed = [conv(xBC, t, taps, bias) for t in range(len(u))]
    x, B, C = np.split(np.stack(mixed), [inner, inner + G * N], axis=-1)
    x = x.reshape(-1, H, P)
    group = np.arange(H) // (H // G)
    B, C = (v.reshape(-1, G, N)[:, group] for v in (B, C))
    dt = np.clip(np.log1p(np.exp(dt + w["dt_bias"])), lo, hi)
    D = w["D"].reshape(H, -1) * np.ones((H, P))
    y = scan(x, dt, -np.exp(w["A_log"]), B, C, D).reshape(len(u), inner)
    for t in range(len(u)):
        if not ssm.get("rmsnorm", True):
            y[t] = y[t] * silu(z[t])
        elif ssm.get("norm_before_gate", False):
            y[t] = grouped_norm(y[t], w["norm.weight"], G, 1e-5) * silu(z[t])
        else:
            y[t] = grouped_norm(y[t] * silu(z[t]), w["norm.weight"], G, 1e-5)
    y = np.concatenate([silu(z0) * x0, y], axis=-1)
    return y @ w["out_proj.weight"].T + w.get("out_proj.bias", 0)


def native_attention(u, w, c):
    """Computes mamba_ssm's MHA: q, k and v pass through a convolution without
    activation, then rotary embedding."""
    heads, kv_heads, hd = c["num_heads"], c["num_heads_kv"], c["head_dim"]
    cuts = np.cumsum([heads * hd, kv_heads * hd, kv_heads * hd])
    projected = u @ w["in_proj.weight"].T + w.get("in_proj.bias", 0)
    qkv, mlp = projected[:, : cuts[-1]], projected[:, cuts[-1] :]
    if "conv1d.weight" in w:
        taps = w["conv1d.weight"][:, 0]
        padded = np.concatenate([np.zeros((taps.shape[1] - 1, qkv.shape[1])), qkv])
        rows = [padded[t : t + taps.shape[1]] for t in range(len(u))]
        qkv = np.stack([(row * taps.T).sum(0) for row in rows]) + w["conv1d.bias"]
    q, k, v = np.split(qkv, cuts[:2], axis=1)
    q, k, v = (z.reshape(len(u), -1, hd) for z in (q, k, v))
    r = c["rotary_emb_dim"]
    frequencies = c.get("rotary_emb_base", 10000.0) ** (-np.arange(0, r, 2) / r)

    def rotate_first(z):
        turned = [rotate(m[:, :r], t, frequencies) for t, m in enumerate(z)]
        return np.concatenate([np.stack(turned), z[..., r:]], axis=-1)

    q, k = rotate_first(q), rotate_first(k)
    out = np.zeros((len(u), heads * hd))
    for t, head in np.ndindex(len(u), heads):
        j = head * kv_heads // heads
        scores = k[: t + 1, j] @ q[t, head] * c.get("softmax_scale", hd**-0.5)
        p = np.exp(scores - scores.max())
        out[t, head * hd : (head + 1) * hd] = p @ v[: t + 1, j] / p.sum()
    up, gate = np.split(mlp, 2, axis=1)
    out = np.concatenate([out, up * silu(gate)], axis=1)
    return out @ w["out_proj.weight"].T + w.get("out_proj.bias", 0)


def native_logits(tokens, config, tensors):
    h = tensors["backbone.embedding.weight"][tokens]
    for i in range(config["n_layer"]):
        layer = f"backbone.layers.{i}."
        w = {k[len(layer) :]: v for k, v in tensors.items() if k.startswith(layer)}
        mixer = {k[6:]: v for k, v in w.items() if k.startswith("mixer.")}
        u = norm(h, w["norm.weight"], 1e-5, w.get("norm.bias"))
        if i in config["attn_layer_idx"]:
            h = h + native_attention(u, mixer, config["attn_cfg"])
        else:
            h = h + native_mixer(u, mixer, config["ssm_cfg"])
        if "mlp.fc1.weight" in w:
            u = norm(h, w["norm2.weight"], 1e-5, w.get("norm2.bias"))
            up, gate = np.split(u @ w["mlp.fc1.weight"].T, 2, axis=-1)
            h = h + (up * silu(gate)) @ w["mlp.fc2.weight"].T
    bias = tensors.get("backbone.norm_f.bias")
    h = norm(h, tensors["backbone.norm_f.weight"], 1e-5, bias)
    return h @ tensors["lm_head.weight"].T


def llama3_frequencies(config, hd):
    s = config["rope_scaling"]
    out = []
    for i in range(0, hd, 2):
        f = config["rope_theta"] ** (-i / hd)
        old = s["original_max_position_embeddings"]
        wavelength = 2 * np.pi / f
        if wavelength > old / s["low_freq_factor"]:
            f = f / s["factor"]
        elif wavelength >= old / s["high_freq_factor"]:
            span = s["high_freq_factor"] - s["low_freq_factor"]
            mix = (old / wavelength - s["low_freq_factor"]) / span
            f = f * ((1 - mix) / s["factor"] + mix)
        out.append(f)
    return np.array(out)


def rotate(x, t, frequencies):
    """Rotates pairs (i, i + hd/2) of x [heads, hd] at position t."""
    left, right = np.split(x, 2, axis=-1)
    cos, sin = np.cos(t * frequencies), np.sin(t * frequencies)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def attention(u, w, heads, kv_heads, frequencies):
    q, k, v = (u @ w[f"self_attn.{n}_proj.weight"].T for n in "qkv")
    hd = q.shape[-1] // heads
    q = q.reshape(-1, heads, hd)
    k, v = (m.reshape(-1, kv_heads, hd) for m in (k, v))
    q = np.stack([rotate(m, t, frequencies) for t, m in enumerate(q)])
    k = np.stack([rotate(m, t, frequencies) for t, m in enumerate(k)])
    out = []
    for t in range(len(u)):
        row = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = k[: t + 1, group] @ q[t, head] * hd**-0.5
            p = np.exp(scores - scores.max())
            row.append((p / p.sum()) @ v[: t + 1, group])
        out.append(np.concatenate(row))
    return np.stack(out) @ w["self_attn.o_proj.weight"].T


def mambainllama_mixer(u, w, mixer):
    """Computes the mixer with q -> C, k -> B and v -> x. x and B are repeated to all
    heads after the convolution."""
    H, N = mixer["ssm_cfg"]["ngroups"], mixer["ssm_cfg"]["d_state"]
    inner, xb = mixer["d_inner"], mixer["d_xb"]
    cuts = np.cumsum([inner, 2 * xb + inner])
    z, xBC, dt = np.split(u @ w["mamba.in_proj.weight"].T, cuts, axis=-1)
    weight, bias = w["mamba.conv1d.weight"], w["mamba.conv1d.bias"]
    mixed = np.stack([conv(xBC, t, weight, bias) for t in range(len(u))])
    x, B, C = np.split(mixed, [xb, 2 * xb], axis=-1)
    x, B = (np.repeat(m.reshape(len(u), -1, N), inner // xb, axis=1) for m in (x, B))
    dt = np.log1p(np.exp(dt + w["mamba.dt_bias"]))
    D = w["mamba.D"][:, None]
    y = scan(x, dt, -np.exp(w["mamba.A_log"]), B, C.reshape(-1, H, N), D)
    y = y.reshape(len(u), inner)
    for t in range(len(u)):
        y[t] = grouped_norm(y[t] * silu(z[t]), w["mamba.norm.weight"], H, 1e-5)
    return y @ w["mamba.out_proj.weight"].T


def mambainllama_logits(tokens, configs, tensors):
    teacher, mixer = configs
    eps, heads = teacher["rms_norm_eps"], teacher["num_attention_heads"]
    frequencies = llama3_frequencies(teacher, teacher["hidden_size"] // heads)
    h = tensors["model.embed_tokens.weight"][tokens]
    for i in range(teacher["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        w = {k[len(layer) :]: v for k, v in tensors.items() if k.startswith(layer)}
        u = norm(h, w["input_layernorm.weight"], eps)
        if i in mixer["attn_layers"]:
            kv_heads = teacher["num_key_value_heads"]
            h = h + attention(u, w, heads, kv_heads, frequencies)
        else:
            h = h + mambainllama_mixer(u, w, mixer)
        u = norm(h, w["post_attention_layernorm.weight"], eps)
        gate, up = (u @ w[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        h = h + (silu(gate) * up) @ w["mlp.down_proj.weight"].T
    return norm(h, tensors["model.norm.weight"], eps) @ tensors["lm_head.weight"].T
