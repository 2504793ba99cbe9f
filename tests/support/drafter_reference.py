"""Published drafters in float64 NumPy: DFlash, DFlash2, DSpark, EAGLE-3 and P-EAGLE.

Every function computes one whole text from its definition: no caches, no batches, and
no code of the library. `arrays` maps short names to weights ([out, in] for matrices):

  fc [d, m d], hidden_norm [d] or 0.hidden_norm [d] (EAGLE-3), norm [d], embed [V, d],
  head [D, d], head_ids [D] int (token of each row of the head; absent if D == V);
  of layer i: i.input_norm, i.q, i.k, i.v, i.o, i.q_norm, i.k_norm, i.sinks [heads],
  i.mlp_norm, i.gate, i.up, i.down;
  DFlash2: i.attention_conv.base [2, taps, d], i.attention_conv.kernels
  [2 taps groups, d], the same for i.mlp_conv, selector.before [V, r],
  selector.after [V, r], selector.hidden [r, d];
  DSpark: markov.before [V, r], markov.after [D, r], markov.gate [r, d + r],
  markov.gate_bias [r], markov.joint [3 r, 2 r + d], markov.joint_bias [3 r],
  confidence.weight [1, d + r] or [1, d], confidence.bias [1];
  EAGLE-3: fc_input_norm [m d], fc_norm.j [d] of tap j, mask_hidden [m d] (P-EAGLE).
"""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Yarn:
    """Parameters of YaRN rotary embeddings, as in a checkpoint's config."""

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class Facts:
    """The options of a drafter's computation, from its config."""

    kind: str  # "dflash", "dflash2", "dspark", "eagle3" or "peagle"
    layers: int
    head_dim: int
    boundaries: tuple[int, ...]  # tapped layer boundaries of the target, ascending
    eps: float = 1e-6
    theta: float = 10_000.0
    interleaved: bool = False  # rotary pairs are (0, 1), (2, 3), .. instead of halves
    yarn: Yarn | None = None
    # Block drafters.
    slots: int = 8  # length of a block, its anchor included
    mask_id: int = 0
    from_anchor: bool = False  # slot k predicts the token after its own position
    causal: tuple[bool, ...] = ()  # by layer: a slot sees no later slot
    windows: tuple[int | None, ...] = ()  # by layer
    markov: str | None = None  # "vanilla", "gated" or "rnn"
    conv_group: int = 16
    top_k: int = 16
    # EAGLE-3 and P-EAGLE.
    norm_before_residual: bool = False
    norm_output: bool = False

    @property
    def drafts(self):
        """Number of tokens that a block proposes."""
        return self.slots if self.from_anchor else self.slots - 1


# --- parts of a layer -----------------------------------------------------------------


def rms_norm(x, weight, eps):
    return weight * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def frequencies(facts):
    """Returns the angle per position of each rotary pair [h / 2], and the factor of
    cosine and sine."""
    pairs = np.arange(facts.head_dim // 2)
    plain = facts.theta ** (-2 * pairs / facts.head_dim)
    if facts.yarn is None:
        return plain, 1.0
    yarn = facts.yarn

    def pair_that_turns(times):
        """Returns the pair that turns so often within the original context."""
        position = math.log(yarn.original / (2 * math.pi * times))
        return facts.head_dim * position / (2 * math.log(facts.theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), facts.head_dim - 1)
    slowed = np.clip((pairs - low) / max(high - low, 1e-3), 0, 1)
    factor = 0.1 * math.log(yarn.factor) + 1
    return plain * (1 - slowed) + plain / yarn.factor * slowed, factor


def rotate(x, positions, facts):
    """Applies rotary embeddings to x [N, heads, h] at positions [N]."""
    step, factor = frequencies(facts)
    turn = factor * np.exp(1j * np.asarray(positions)[:, None, None] * step)
    half = facts.head_dim // 2
    if facts.interleaved:
        pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)
    pairs = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([pairs.real, pairs.imag], -1)


def attend(q, k, v, visible, sinks=None):
    """Attends query by query and head by head.

    Args:
      q: [N, heads, h]. Rotated queries.
      k: [S, kv_heads, h]. Rotated keys.
      v: [S, kv_heads, h].
      visible: [N, S] bool.
      sinks: [heads]. Logit of each head's sink, which takes mass and adds no value.

    Returns:
      [N, heads h].
    """
    rows, heads, h = q.shape
    shared = heads // k.shape[1]
    out = np.zeros(q.shape)
    for row in range(rows):
        keys = np.flatnonzero(visible[row])
        for head in range(heads):
            logits = k[keys, head // shared] @ q[row, head] / math.sqrt(h)
            if sinks is not None:
                logits = np.append(logits, sinks[head])
            mass = np.exp(logits - logits.max())
            mass /= mass.sum()
            out[row, head] = mass[: len(keys)] @ v[keys, head // shared]
    return out.reshape(rows, heads * h)


def heads_of(arrays, facts, name, x):
    """Returns the projection [N, heads, h] of x [N, width], normed if it has a norm."""
    out = (x @ arrays[name].T).reshape(len(x), -1, facts.head_dim)
    norm = arrays.get(f"{name}_norm")
    return out if norm is None else rms_norm(out, norm, facts.eps)


def self_attention(arrays, facts, layer, x, positions, visible, context=None, at=()):
    """Runs attention of x [N, width] over optional context rows [S, width], then x."""
    source = x if context is None else np.concatenate([context, x])
    places = np.concatenate([np.asarray(at, int), positions])
    q = rotate(heads_of(arrays, facts, f"{layer}.q", x), positions, facts)
    k = rotate(heads_of(arrays, facts, f"{layer}.k", source), places, facts)
    v = (source @ arrays[f"{layer}.v"].T).reshape(len(source), -1, facts.head_dim)
    out = attend(q, k, v, visible, arrays.get(f"{layer}.sinks"))
    return out @ arrays[f"{layer}.o"].T


def mlp(arrays, layer, x):
    gate = x @ arrays[f"{layer}.gate"].T
    up = x @ arrays[f"{layer}.up"].T
    return (gate * sigmoid(gate) * up) @ arrays[f"{layer}.down"].T


def convolved(arrays, facts, name, sublayer, x):
    """Runs `sublayer` between the two convolutions `name` of DFlash2.

    Both take their kernels from the input x [B, d]: a kernel per slot, tap and group of
    channels, added to a learnt one per tap and channel.
    """
    if f"{name}.base" not in arrays:
        return sublayer(x)
    base = arrays[f"{name}.base"]
    groups = x.shape[1] // facts.conv_group
    kernels = (x @ arrays[f"{name}.kernels"].T).reshape(len(x), *base.shape[:2], groups)
    kernels = base + np.repeat(kernels, facts.conv_group, axis=-1)

    def convolve(side, values):
        out = np.zeros(values.shape)
        for slot in range(len(values)):
            for tap in range(min(base.shape[1], slot + 1)):
                out[slot] += kernels[slot, side, tap] * values[slot - tap]
        return out

    return convolve(1, sublayer(convolve(0, x)))


# --- block drafters: DFlash, DFlash2, DSpark ------------------------------------------


def context_rows(arrays, facts, taps):
    """Returns what attention reads of tokens with taps [N, m, d]: [N, d]."""
    fused = taps.reshape(len(taps), arrays["fc"].shape[1]) @ arrays["fc"].T
    return rms_norm(fused, arrays["hidden_norm"], facts.eps)


def visible_keys(facts, layer, at, positions):
    """Returns [B, N + B] bool: the context rows and slots that each slot sees."""
    places = np.concatenate([at, positions])
    distance = positions[:, None] - places
    is_slot = np.arange(len(places)) >= len(at)
    visible = np.ones(distance.shape, bool)
    if facts.causal[layer]:
        visible &= ~is_slot | (distance >= 0)
    if (window := facts.windows[layer]) is not None:
        visible &= np.abs(distance) < window
    return visible


def block_states(arrays, facts, taps, anchor, at=None, slots=None):
    """Returns the normed states [slots, d] of a block.

    Args:
      taps: [N, m, d]. Tapped states of the tokens before the anchor.
      anchor: The last committed token, which the target has not read.
      at: [N]. Positions of the tokens with taps, by default 0 .. N - 1. The anchor
        comes after the last one.
      slots: Length of the block, by default that of the config.
    """
    at = np.arange(len(taps)) if at is None else np.asarray(at)
    slots = facts.slots if slots is None else slots
    positions = (at[-1] + 1 if len(at) else 0) + np.arange(slots)
    context = context_rows(arrays, facts, taps)
    x = arrays["embed"][[anchor] + [facts.mask_id] * (slots - 1)]
    for layer in range(facts.layers):
        visible = visible_keys(facts, layer, at, positions)

        def attention(u, layer=layer, visible=visible):
            return self_attention(
                arrays, facts, layer, u, positions, visible, context, at
            )

        def feed_forward(u, layer=layer):
            return mlp(arrays, layer, u)

        u = rms_norm(x, arrays[f"{layer}.input_norm"], facts.eps)
        x = x + convolved(arrays, facts, f"{layer}.attention_conv", attention, u)
        u = rms_norm(x, arrays[f"{layer}.mlp_norm"], facts.eps)
        x = x + convolved(arrays, facts, f"{layer}.mlp_conv", feed_forward, u)
    return rms_norm(x, arrays["norm"], facts.eps)


def markov_bias(arrays, facts, hidden, previous, memory=None):
    """Returns the bias [D] of a slot with state `hidden` [d] after token `previous`,
    and the memory [r] for the next slot, which only "rnn" heads use."""
    before = arrays["markov.before"][previous]
    if facts.markov == "vanilla":
        code = before
    elif facts.markov == "gated":
        read = arrays["markov.gate"] @ np.concatenate([hidden, before])
        code = sigmoid(read + arrays["markov.gate_bias"]) * before
    else:
        memory = np.zeros(before.shape) if memory is None else memory
        read = arrays["markov.joint"] @ np.concatenate([memory, before, hidden])
        keep, new, out = np.split(read + arrays["markov.joint_bias"], 3)
        memory = sigmoid(keep) * memory + (1 - sigmoid(keep)) * np.tanh(new)
        code = np.tanh(out)
    return arrays["markov.after"] @ code, memory


def scores_after(arrays, facts, hidden, previous, memory=None):
    """Returns the scores [D] of a slot's tokens if `previous` comes before them, and
    the memory for the next slot.

    Softmax of the scores is the drafter's distribution. For DFlash they do not depend
    on `previous`. For DFlash2 only the best `top_k` tokens have finite scores.
    """
    logits = arrays["head"] @ hidden
    if facts.kind == "dspark":
        bias, memory = markov_bias(arrays, facts, hidden, previous, memory)
        return logits + bias, memory
    if facts.kind == "dflash":
        return logits, None
    best = np.argsort(-logits, kind="stable")[: facts.top_k]
    edge = arrays["selector.before"][previous] * (arrays["selector.hidden"] @ hidden)
    scores = np.full(logits.shape, -np.inf)
    scores[best] = logits[best] + arrays["selector.after"][best] @ edge
    return scores, None


def confidence(arrays, hidden, previous):
    """Returns the predicted chance that the token after `previous` is accepted."""
    weight = arrays["confidence.weight"][0]
    features = hidden
    if len(weight) > len(hidden):
        features = np.concatenate([hidden, arrays["markov.before"][previous]])
    return sigmoid(weight @ features + arrays["confidence.bias"][0])


def token_of(arrays, row):
    """Returns the target's token of a row of the head."""
    return int(arrays["head_ids"][row]) if "head_ids" in arrays else int(row)


def draft(arrays, facts, taps, anchor, at=None, path=None):
    """Drafts a greedy chain, or scores a given one.

    Args:
      taps, anchor, at: See `block_states`.
      path: Draft tokens to condition on, in place of the best ones.

    Returns:
      (tokens [drafts], scores [drafts, D], confidences [drafts], empty without a head).
    """
    states = block_states(arrays, facts, taps, anchor, at)
    states = states if facts.from_anchor else states[1:]
    tokens, scores, sure, memory, previous = [], [], [], None, anchor
    for depth, hidden in enumerate(states):
        if "confidence.weight" in arrays:
            sure.append(confidence(arrays, hidden, previous))
        row, memory = scores_after(arrays, facts, hidden, previous, memory)
        scores.append(row)
        tokens.append(token_of(arrays, row.argmax()))
        previous = tokens[-1] if path is None else path[depth]
    return tokens, np.array(scores), np.array(sure)


# --- EAGLE-3 and P-EAGLE --------------------------------------------------------------


def pair_vectors(arrays, facts, taps):
    """Returns what a head reads of states with taps [N, m, d]: [N, d]."""
    joined = taps.reshape(len(taps), -1)
    if "fc_input_norm" in arrays:
        joined = rms_norm(joined, arrays["fc_input_norm"], facts.eps)
    if "fc_norm.0" in arrays:
        normed = [
            rms_norm(taps[:, j], arrays[f"fc_norm.{j}"], facts.eps)
            for j in range(taps.shape[1])
        ]
        joined = np.concatenate(normed, axis=1)
    return joined @ arrays["fc"].T


def eagle_pass(arrays, facts, tokens, vectors, positions, visible):
    """Runs the layers over pairs of a token and a vector.

    Args:
      tokens: [N]. The token of each pair.
      vectors: [N, d]. From `pair_vectors` of the state that predicted the token, or
        what the pass handed down for that state.
      positions: [N].
      visible: [N, N] bool. Row n sees the pairs visible[n].

    Returns:
      (logits [N, D], vectors [N, d] to hand down).
    """
    positions, vectors = np.asarray(positions), np.asarray(vectors)
    token = arrays["embed"][np.asarray(tokens)]
    token = rms_norm(token, arrays["0.input_norm"], facts.eps)
    state = rms_norm(vectors, arrays["0.hidden_norm"], facts.eps)
    both = np.concatenate([token, state], axis=1)
    x = state if facts.norm_before_residual else vectors
    for layer in range(facts.layers):
        norm = arrays[f"{layer}.input_norm"]
        u = both if layer == 0 else rms_norm(x, norm, facts.eps)
        x = x + self_attention(arrays, facts, layer, u, positions, visible)
        u = rms_norm(x, arrays[f"{layer}.mlp_norm"], facts.eps)
        x = x + mlp(arrays, layer, u)
    normed = rms_norm(x, arrays["norm"], facts.eps)
    return normed @ arrays["head"].T, normed if facts.norm_output else x


def eagle_draft(arrays, facts, tokens, taps, depth, path=None):
    """Drafts a greedy chain of an EAGLE-3 head, or scores a given one.

    Args:
      tokens: [N]. tokens[n] was predicted from the state with taps[n].
      taps: [N, m, d].
      depth: Number of draft tokens.
      path: Draft tokens to condition on, in place of the best ones.

    Returns:
      (draft tokens [depth], logits [depth, D]).
    """
    tokens, vectors = list(tokens), list(pair_vectors(arrays, facts, taps))
    drafts, scores = [], []
    for level in range(depth):
        seen = np.tri(len(tokens), dtype=bool)
        positions = np.arange(len(tokens))
        logits, handed = eagle_pass(arrays, facts, tokens, vectors, positions, seen)
        scores.append(logits[-1])
        drafts.append(token_of(arrays, logits[-1].argmax()))
        tokens.append(drafts[-1] if path is None else path[level])
        vectors.append(handed[-1])
    return drafts, np.array(scores)


def peagle_draft(arrays, facts, tokens, taps, depth):
    """Drafts `depth` tokens in one pass of a P-EAGLE head; see `eagle_draft`."""
    hidden = arrays["mask_hidden"].reshape(1, *taps.shape[1:])
    every = np.concatenate([taps, np.repeat(hidden, depth - 1, axis=0)])
    rows = list(tokens) + [facts.mask_id] * (depth - 1)
    logits, _ = eagle_pass(
        arrays,
        facts,
        rows,
        pair_vectors(arrays, facts, every),
        np.arange(len(rows)),
        np.tri(len(rows), dtype=bool),
    )
    scores = logits[len(tokens) - 1 :]
    return [token_of(arrays, row) for row in scores.argmax(1)], scores
