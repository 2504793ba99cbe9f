"""Slow definitions in float64 NumPy, and tolerances for each dtype.

They share no code with the library: paths are walked parent by parent in Python, states
are stepped token by token, attention lists its keys one by one.
"""

import numpy as np

# Largest error, relative to the largest value of the result, by dtype of the inputs.
# OP_TOLERANCE: one op against its definition. MODEL_TOLERANCE: a few layers computed in
# two different ways.
OP_TOLERANCE = {"float32": 3e-6, "bfloat16": 1e-2}
MODEL_TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}


def assert_near(actual, expected, tolerance, floor=1e-30):
    """Checks that errors are at most `tolerance` times the largest expected
    magnitude."""
    actual = np.asarray(actual, np.float64)
    expected = np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert np.isfinite(actual).all(), "not finite"
    if expected.size == 0:
        return
    error = np.abs(actual - expected).max()
    allowed = tolerance * max(np.abs(expected).max(), floor)
    assert error <= allowed, f"error {error:.3e} > allowed {allowed:.3e}"


# --- topology -------------------------------------------------------------------------


def path_to(parents, node):
    """Returns the rows of one tree from the first uncommitted ancestor down to
    `node`."""
    path = []
    while node >= 0:
        path.append(int(node))
        node = parents[node]
    return path[::-1]


def mask_of(parents):
    """Returns [T, T] bool: [t, s] is true if s is on the path to t."""
    mask = np.zeros((len(parents), len(parents)), bool)
    for t in range(len(parents)):
        mask[t, path_to(parents, t)] = True
    return mask


def depth_of(parents):
    return np.array([len(path_to(parents, t)) - 1 for t in range(len(parents))])


def window_of(parents, taps):
    """Returns [T, K]: rows of concat(window [K-1], nodes) under a K-tap convolution."""
    committed = list(range(taps - 1))
    rows = [
        (committed + [taps - 1 + s for s in path_to(parents, t)])[-taps:]
        for t in range(len(parents))
    ]
    return np.array(rows).reshape(len(parents), taps)


def chain(T):
    return np.arange(T) - 1


def star(T):
    return np.where(np.arange(T) == 0, -1, 0)


def binary(T):
    return (np.arange(T) + 1) // 2 - 1


def random_tree(rng, T):
    return np.array([-1, *(rng.integers(0, t) for t in range(1, T))])


def random_forest(rng, T):
    return np.array([rng.integers(-1, t) for t in range(T)])


def random_parents(rng, batch, T):
    """Returns [batch, T] int32: a random kind of tree in each row."""
    kinds = [
        chain,
        star,
        binary,
        lambda T: random_tree(rng, T),
        lambda T: random_forest(rng, T),
        lambda T: np.full(T, -1),
    ]
    rows = [kinds[rng.integers(len(kinds))](T) for _ in range(batch)]
    return np.stack(rows).astype(np.int32)


def random_order(rng, T):
    """Returns [T, T] bool: a reflexive partial order, with its elements in random
    order."""
    order = np.tril(rng.random((T, T)) < 0.3) | np.eye(T, dtype=bool)
    for k in range(T):
        order |= order[:, k : k + 1] & order[k : k + 1]
    shuffle = rng.permutation(T)
    return order[np.ix_(shuffle, shuffle)]


# --- the recurrence h = exp(a) h + dt x (outer) B, y = C h + D x, of one sequence -----


def _step(h, x, dt, a, B):
    """Returns the next h [H, P, N], from x [H, P], dt [H], a [H], B [G, N], in
    float64."""
    heads = h.shape[0]
    h = h.copy()
    for i in range(heads):
        group = i * B.shape[0] // heads
        h[i] = np.exp(a[i]) * h[i] + dt[i] * np.outer(x[i], B[group])
    return h


def _read(h, x, C, D):
    """Returns y [H, P]."""
    heads = h.shape[0]
    y = np.zeros(h.shape[:2])
    for i in range(heads):
        y[i] = h[i] @ C[i * C.shape[0] // heads] + D[i] * x[i]
    return y


def _float64(*arrays):
    return [np.asarray(z).astype(np.float64) for z in arrays]


def step_path(h0, x, dt, a, B, path):
    """Returns the state after the tokens in rows `path` of one sequence."""
    h, x, dt, a, B = _float64(h0, x, dt, a, B)
    for s in path:
        h = _step(h, x[s], dt[s], a[s], B[s])
    return h


def scan_tree(x, dt, a, B, C, D, h0, parents, rows=None):
    """Returns [B, Tq, H, P]: for every node, the recurrence along its path.

    C has only the queries, whose rows are `rows` (all by default).
    """
    x, dt, a, B, C, D, h0 = _float64(x, dt, a, B, C, D, h0)
    rows = range(x.shape[1]) if rows is None else rows
    y = np.zeros((x.shape[0], len(rows), *x.shape[2:]))
    for b in range(x.shape[0]):
        for i, t in enumerate(rows):
            path = path_to(parents[b], t)
            h = step_path(h0[b], x[b], dt[b], a[b], B[b], path)
            y[b, i] = _read(h, x[b, t], C[b, i], D)
    return y


def scan_order(x, dt, a, B, C, D, h0, mask):
    """Returns [B, T, H, P]: the sum over s <= t of a partial order, term by term.

    y_t = C_t . (exp(sum of a up to t) h0
                 + sum_s exp(sum of a up to t - sum of a up to s) dt_s x_s B_s) + D x_t
    """
    x, dt, a, B, C, D, h0 = _float64(x, dt, a, B, C, D, h0)
    batch, T, heads = dt.shape
    y = np.zeros_like(x)
    for b in range(batch):
        below = [np.flatnonzero(mask[b, t]) for t in range(T)]
        total = np.array([a[b, below[t]].sum(0) for t in range(T)])  # [T, H]
        for t in range(T):
            h = np.exp(total[t])[:, None, None] * h0[b]
            for s in below[t]:
                for i in range(heads):
                    group = i * B.shape[2] // heads
                    decay = np.exp(total[t, i] - total[s, i]) * dt[b, s, i]
                    h[i] += decay * np.outer(x[b, s, i], B[b, s, group])
            y[b, t] = _read(h, x[b, t], C[b, t], D)
    return y


def conv_tree(u, weight, bias, window0, parents):
    """Returns [B, T, C]: the last K inputs on each node's path, tap by tap."""
    u, weight, window0 = _float64(u, weight, window0)
    taps = weight.shape[1]
    y = np.zeros_like(u)
    for b in range(u.shape[0]):
        for t in range(u.shape[1]):
            seen = [*window0[b], *(u[b, s] for s in path_to(parents[b], t))]
            for k in range(taps):
                y[b, t] += weight[:, taps - 1 - k] * seen[len(seen) - 1 - k]
            if bias is not None:
                y[b, t] += np.asarray(bias, np.float64)
    return y


def attend_tree(q, k, v, k_cache, v_cache, length, mask, scale):
    """Returns [B, Tq, Hq, hd]: softmax over an explicit list of keys per query and
    head."""
    q, k, v, k_cache, v_cache = _float64(q, k, v, k_cache, v_cache)
    out = np.zeros_like(q)
    for b, t, i in np.ndindex(q.shape[:3]):
        j = i * k.shape[2] // q.shape[2]
        keys = [k_cache[b, j, s] for s in range(length[b])]
        values = [v_cache[b, j, s] for s in range(length[b])]
        for s in range(k.shape[1]):
            if mask[b, t, s]:
                keys.append(k[b, s, j])
                values.append(v[b, s, j])
        scores = np.array([scale * q[b, t, i] @ key for key in keys])
        weight = np.exp(scores - scores.max())
        out[b, t, i] = (weight / weight.sum()) @ np.array(values)
    return out
