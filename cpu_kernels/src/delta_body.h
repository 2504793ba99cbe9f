// A Gated DeltaNet mixer between its projections. Include after conv_body.h.
//
// The reference implementation in JAX is `equations` in models/mixers/delta.py, and
// pallas_kernels/delta.py explains the rule: the corrections u that the nodes of a tree write to
// the state solve a triangular system, in which only ancestors meet. A head's state is read and
// written once: it is replayed, then multiplied by the keys and queries of all nodes. The sums of
// the system and of the outputs go over a node's ancestors in order, so they depend on its path
// alone, bit for bit.

constexpr float KEY_EPS = 1e-6f;  // L2_EPS in models/mixers/delta.py

// Computes beta of the queried nodes, and their log decays if these are by head.
TARGET inline void write_gates(const Delta& d, int64_t b, const Shared& shared) {
  using V = Lanes;
  const Scan& s = d.scan;
  for (int64_t q = 0; q < s.queries[b]; q++) {
    const int64_t t = node_of(s, q);
    if (t >= s.T) continue;
    const float* in = d.gates + (b * s.Tq + q) * d.gates_width;
    float* a = d.a + (b * s.now.capacity + t) * s.H;
    float* beta = shared.of_queries + q * s.H;
    for (int64_t h = 0; h < s.H; h += V::W) {
      const int64_t count = s.H - h;
      V::store(beta + h, V::F{} + d.beta_max / (V::exp(-V::load(in + h, count)) + 1.0f), count);
      if (s.a_by_column) continue;
      const auto step = V::softplus(V::load(in + s.H + h, count) + V::load(d.dt_bias + h, count));
      V::store(a + h, -step * V::exp(V::load(d.A_log + h, count)), count);
    }
  }
}

// Copies the factors that normalize a group's keys of the path, for each head of the group.
TARGET inline void read_key_scales(const Scan& s, int64_t b, int64_t g, const Shared& shared) {
  const int64_t heads = s.H / s.G;
  for (int64_t j = 0; j < path_length(s, b); j++) {
    const int64_t row = b * s.past.capacity + s.path[b * s.M + j];
    for (int64_t h = g * heads; h < (g + 1) * heads; h++)
      shared.path_dt[j * s.H + h] = s.past.dt[row * s.G + g];
  }
}

// Returns the factor that gives a row of n numbers length 1.
TARGET inline float normalizing(const float* row, int64_t n) {
  using V = Lanes;
  V::F squares = V::F{};
  for (int64_t i = 0; i < n; i += V::W) {
    const V::F x = V::load(row + i, V::W);
    squares = V::fma(x, x, squares);
  }
  return 1.0f / __builtin_sqrtf(V::sum(squares) + KEY_EPS);
}

TARGET inline void scale_row(float* to, const float* from, float factor, int64_t n) {
  using V = Lanes;
  for (int64_t i = 0; i < n; i += V::W) V::store(to + i, V::load(from + i, V::W) * factor, V::W);
}

// Decays a head's keys of the path by column, each from its token to the end of the path, and
// computes how much the path keeps of every column.
template <class L>
TARGET void decay_path(const Scan& s, int64_t b, int64_t head, const Shared& shared) {
  using V = Lanes;
  const int64_t n = rounded_up(s.N, L::step);
  float* const after = shared.kept + head * n;
  for (int64_t i = 0; i < n; i++) after[i] = 1.0f;
  for (int64_t j = path_length(s, b) - 1; j >= 0; j--) {
    const int64_t row = b * s.past.capacity + s.path[b * s.M + j];
    const float* const a = s.past.a + (row * s.H + head) * s.N;
    float* const key = shared.past_B + (head * s.M + j) * n;
    for (int64_t i = 0; i < s.N; i += V::W) {
      const V::F kept = V::load(after + i, V::W);
      V::store(key + i, V::load(key + i, V::W) * kept, V::W);
      V::store(after + i, kept * V::exp(V::load(a + i, s.N - i)), V::W);
    }
  }
}

// Copies the log decays by column of the queried nodes of a head to the record, and computes the
// factors of all nodes.
template <class L>
TARGET void write_factors(const Delta& d, int64_t b, int64_t head, const Shared& shared) {
  using V = Lanes;
  const Scan& s = d.scan;
  const int64_t n = rounded_up(s.N, L::step);
  const auto record = [&](int64_t t) TARGET {
    return d.a + ((b * s.now.capacity + t) * s.H + head) * s.N;
  };
  for (int64_t q = 0; q < s.queries[b]; q++) {
    const int64_t t = node_of(s, q);
    const float* in = d.gates + (b * s.Tq + q) * d.gates_width + s.H + head * s.N;
    if (t < s.T) __builtin_memcpy(record(t), in, s.N * sizeof(float));
  }
  for (int64_t t = 0; t < s.nodes[b]; t++) {
    float* const to = shared.factors + (head * s.T + t) * n;
    for (int64_t i = 0; i < n; i += V::W)
      V::store(to + i, i < s.N ? V::exp(V::load(record(t) + i, s.N - i)) : V::F{}, V::W);
  }
}

// Computes the products of keys and queries with the keys of ancestors, which decay by column from
// there, and then decays the keys and queries themselves. Walks from each node to its root and
// multiplies the factors on the way: quotients of the decays of whole paths would overflow. Reads
// the mask, because another thread may be writing shared.ancestors.
template <class L>
TARGET void score_by_column(const Scan& s, int64_t b, int64_t head, const Shared& shared) {
  using V = Lanes;
  const int64_t T = s.T, n = rounded_up(s.N, L::step);
  const float* const B = shared.B + head * T * n;
  const float* const factors = shared.factors + head * T * n;
  float* const walk = shared.walk + head * n;
  for (int64_t q = 0; q < s.queries[b]; q++) {
    const int64_t t = node_of(s, q);
    if (t >= T) continue;
    float* const key = shared.C + (head * s.Tq + q) * 2 * n;
    float* const query = key + n;
    float* const scores = shared.scores + (head * s.Tq + q) * 2 * T;
    for (int64_t i = 0; i < n; i++) walk[i] = 1.0f;
    const uint8_t* const is_ancestor = s.mask + (b * T + t) * T;
    for (int64_t of = T - 1; of >= 0; of--) {
      if (!is_ancestor[of]) continue;
      V::F by_key = V::F{}, by_query = V::F{};
      for (int64_t i = 0; i < n; i += V::W) {
        const V::F kept = V::load(walk + i, V::W), k = V::load(B + of * n + i, V::W) * kept;
        by_key = V::fma(V::load(key + i, V::W), k, by_key);
        by_query = V::fma(V::load(query + i, V::W), k, by_query);
        V::store(walk + i, kept * V::load(factors + of * n + i, V::W), V::W);
      }
      scores[of] = V::sum(by_key), scores[T + of] = V::sum(by_query);
    }
    for (int64_t i = 0; i < n; i += V::W) {
      const V::F kept = V::load(walk + i, V::W);
      V::store(key + i, V::load(key + i, V::W) * kept, V::W);
      V::store(query + i, V::load(query + i, V::W) * kept, V::W);
    }
  }
}

// Computes the keys and queries of a group. The first group also prepares what all groups share.
template <class L, class E>
TARGET void group_of(const Delta& d, void* base, int64_t b, int64_t g) {
  using V = Lanes;
  const Scan& s = d.scan;
  const Shared shared = shared_of<L>(s, base, b);
  const int64_t n = rounded_up(s.N, L::step);
  if (g == 0) {
    find_ancestors(s, b, shared);
    if (!s.a_by_column) read_steps(s, b, s.past.a, shared.path_a);
    for (int64_t i = 0; s.a_by_column && i < s.M * s.H; i++) shared.path_a[i] = 0.0f;
    write_gates(d, b, shared);
  }
  read_path<L>(s, b, g, shared);
  if (s.a_by_column) {
    decay_path<L>(s, b, g, shared);
    write_factors<L>(d, b, g, shared);
  }
  read_key_scales(s, b, g, shared);
  E* const keys = static_cast<E*>(d.B) + (b * s.now.capacity * s.G + g) * s.N;
  const int64_t of_q = g * s.N, of_k = (s.G + g) * s.N;
  move_window<E>(d, b, of_q, s.N);
  move_window<E>(d, b, of_k, s.N);
  convolve<L, E>(d, b, of_k, s.N, [&](int64_t, int64_t t, int64_t i, auto x) TARGET {
    V::store(keys + t * s.G * s.N + i, x, s.N - i);
  });
  float* const C = shared.C + g * s.Tq * 2 * n;
  for (int64_t i = 0; s.rows && i < s.Tq * 2 * n; i++) C[i] = 0.0f;
  convolve<L, E>(d, b, of_q, s.N, [&](int64_t q, int64_t, int64_t i, auto x) TARGET {
    V::store(C + (2 * q + 1) * n + i, V::rounded(x, keys), n - i);
  });
  read_B<L>(s, b, g, shared);
  float* const B = shared.B + g * s.T * n;
  float* const scales = d.k_scale + b * s.now.capacity * s.G + g;
  for (int64_t q = 0; q < s.queries[b]; q++) {
    const int64_t t = node_of(s, q);
    if (t < s.T) scales[t * s.G] = normalizing(B + t * n, n);
  }
  for (int64_t t = 0; t < s.nodes[b]; t++) scale_row(B + t * n, B + t * n, scales[t * s.G], n);
  const float root = 1.0f / __builtin_sqrtf(static_cast<float>(s.N));
  for (int64_t q = 0; q < s.queries[b]; q++) {
    const int64_t t = node_of(s, q);
    if (t >= s.T) continue;
    float* const key = C + 2 * q * n;
    float* const query = key + n;
    __builtin_memcpy(key, B + t * n, n * sizeof(float));
    scale_row(query, query, normalizing(query, n) * root, n);
  }
  s.a_by_column ? score_by_column<L>(s, b, g, shared) : score_nodes<L>(s, b, g, shared, true);
}

template <class L>
TARGET void delta_group(const Delta& d, void* base, int64_t b, int64_t g) {
  d.scan.bf16 ? group_of<L, uint16_t>(d, base, b, g) : group_of<L, float>(d, base, b, g);
}

// Writes norm(from) * gate(z) to y. `from` is [p].
template <class E>
TARGET inline void norm_row(const Delta& d, const float* from, const float* z, float* y) {
  using V = Lanes;
  const int64_t P = d.scan.P;
  const E* const scale = static_cast<const E*>(d.norm);
  V::F squares = V::F{};
  for (int64_t i = 0; i < P; i += V::W) {
    const V::F x = V::load(from + i, P - i);
    squares = V::fma(x, x, squares);
  }
  const float mean = V::sum(squares) / static_cast<float>(P);
  const V::F factor = V::F{} + 1.0f / __builtin_sqrtf(mean + d.eps);
  for (int64_t i = 0; i < P; i += V::W) {
    const int64_t count = P - i;
    const V::F normed = V::load(from + i, V::W) * factor * V::load(scale + i, count);
    const V::F of_z = V::load(z + i, count);
    const V::F gate = d.sigmoid ? V::F{} + 1.0f / (V::exp(-of_z) + 1.0f) : V::silu(of_z);
    V::store(y + i, normed * gate, count);
  }
}

// Solves the system of the queried nodes, and computes their outputs, normed and gated; own.x
// holds their v, and the u of other nodes:
//
//   u_t = beta_t (v_t - exp(A_t) S k_t - sum over s < t of exp(A_t - A_s) (k_t . k_s) u_s)
//   y_t = exp(A_t) S q_t + sum over s <= t of exp(A_t - A_s) (q_t . k_s) u_s
//
// where s < t means that s is an ancestor of t.
TARGET inline void solve_nodes(const Delta& d, int64_t b, int64_t head, const Shared& shared,
                               const Own& own) {
  using V = Lanes;
  const Scan& s = d.scan;
  const int64_t T = s.T, p = rounded_up(s.P, 16), g = head / (s.H / s.G);
  const int64_t width = rounded_up(s.P, V::W);
  float* const record = static_cast<float*>(d.x);
  weigh_ancestors(s, b, shared, own);
  const float* decay = own.weight;
  for (int64_t q = 0; q < s.queries[b]; q++) {
    const int64_t t = node_of(s, q);
    float* const y = s.y + ((b * s.Tq + q) * s.H + head) * s.P;
    if (t >= T) {
      for (int64_t j = 0; j < s.P; j++) y[j] = 0.0f;
      continue;
    }
    const float* scores = shared.scores + (g * s.Tq + q) * 2 * T;
    const int32_t* ancestors = shared.ancestors + t * T;
    const int32_t count = shared.count[t], before = count > 0 ? count - 1 : 0;
    float* const weight = own.pair;
    for (int32_t i = 0; i < count; i++) {
      const int32_t of = ancestors[i];
      weight[i] = decay[i] * scores[of];
      weight[T + i] = decay[i] * scores[T + of];
    }
    decay += count;
    const V::F beta = V::F{} + shared.of_queries[q * s.H + head];
    const V::F itself = V::F{} + (count > 0 ? weight[T + before] : 0.0f);
    float* const x = own.x + t * p;
    float* const u = record + ((b * s.now.capacity + t) * s.H + head) * s.P;
    const auto outputs = [&](int64_t j, auto& sum) TARGET {
      add_ancestors(sum, own.carried + q * 2 * p + j, own.decay[t], weight, T, ancestors, before,
                    own.x + j, p);
      const auto* read = sum[1];
      for (const auto& known : sum[0]) {
        const V::F added = beta * (V::load(x + j, V::W) - known);
        V::store(x + j, added, V::W);
        V::store(u + j, added, s.P - j);
        V::store(own.y + j, V::fma(itself, added, *read++), V::W);
        j += V::W;
      }
    };
    int64_t j = 0;
    for (V::F sum[2][4]; j + 4 * V::W <= width; j += 4 * V::W) outputs(j, sum);
    for (V::F sum[2][1]; j < width; j += V::W) outputs(j, sum);
    const float* const z = d.in + (b * s.Tq + q) * d.width + d.to_z + head * s.P;
    d.weights_bf16 ? norm_row<uint16_t>(d, own.y, z, y) : norm_row<float>(d, own.y, z, y);
  }
}

// Prefetches a head's u of the queried nodes, which will be overwritten.
TARGET inline void fetch_record(const Delta& d, int64_t b, int64_t head) {
  const Scan& s = d.scan;
  for (int64_t q = 0; q < s.queries[b]; q++) {
    const int64_t t = node_of(s, q);
    if (t >= s.T) continue;
    const float* u = static_cast<const float*>(d.x) + ((b * s.now.capacity + t) * s.H + head) * s.P;
    for (int64_t i = 0; i < s.P; i += 16) __builtin_prefetch(u + i, 1);
  }
}

template <class L, class E>
TARGET void head_of(const Delta& d, void* base, void* scratch, int64_t place, int64_t next) {
  using V = Lanes;
  const Scan& s = d.scan;
  const int64_t b = place / s.H, head = place % s.H, p = rounded_up(s.P, 16);
  const int64_t of_v = 2 * s.G * s.N, channel = of_v + head * s.P;
  const Shared shared = shared_of<L>(s, base, b);
  Own own;
  own_layout(s, static_cast<char*>(scratch), &own);
  const float kept = path_weights(s, b, head, shared, own);  // before u is overwritten
  if (s.rows) read_x(s, b, head, own);
  move_window<E>(d, b, channel, s.P);
  convolve<L, E>(d, b, channel, s.P, [&](int64_t, int64_t t, int64_t i, auto v) TARGET {
    V::store(own.x + t * p + i, V::rounded(v, static_cast<const E*>(nullptr)), p - i);
  });
  fetch_inputs(d, b, d.to_z + head * s.P, s.P);
  fetch_record(d, b, head);
  if (next >= 0) fetch_inputs(d, next / s.H, d.to_inputs + of_v + next % s.H * s.P, s.P);
  replay_head<L>(s, b, head, next, kept, shared, own);
  if (s.a_by_column) {  // keys, queries and scores have the decays already
    for (int64_t t = 0; t < s.nodes[b]; t++) own.sum[t] = 0.0, own.decay[t] = 1.0f;
  } else {
    sum_decays(s, b, head, shared, own);
  }
  solve_nodes(d, b, head, shared, own);
}

template <class L>
TARGET void delta_head(const Delta& d, void* base, void* own, int64_t head, int64_t next) {
  d.scan.bf16 ? head_of<L, uint16_t>(d, base, own, head, next)
              : head_of<L, float>(d, base, own, head, next);
}

TARGET inline int64_t delta_own_bytes(const Delta& d) { return own_bytes(d.scan); }

template <class L>
TARGET int64_t delta_shared_bytes(const Delta& d) {
  return shared_bytes<L>(d.scan);
}

template <class L>
constexpr MixerKernel<Delta> delta_kernel() {
  return {delta_shared_bytes<L>, delta_own_bytes, delta_group<L>, delta_head<L>, nullptr};
}
