// A Gated DeltaNet mixer between its projections. Include after conv_body.h.
//
// The reference implementation in JAX is `equations` in models/mixers/delta.py, and
// pallas_kernels/delta.py explains the rule. The walk of scan_body.h multiplies a node's key and
// query with the state of its parent; from the product with the key follows the correction u that
// the node adds to the state. The record keeps u, so that a replay adds the same numbers.

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

// Normalizes a group's keys of the path, as its nodes' were.
TARGET inline void normalize_path(const Scan& s, int64_t b, int64_t g, int64_t n,
                                  const Shared& shared) {
  for (int64_t j = 0; j < path_length(s, b); j++) {
    const int64_t row = b * s.past.capacity + s.path[b * s.M + j];
    float* const key = shared.past_B + (g * s.M + j) * n;
    scale_row(key, key, s.past.dt[row * s.G + g], n);
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

// Multiplies a query's key and query vector by the decays of their node by column.
template <class L>
TARGET inline void decay_query(const Scan& s, int64_t head, int64_t t, float* key,
                               const Shared& shared) {
  using V = Lanes;
  const int64_t n = rounded_up(s.N, L::step);
  const float* const factors = shared.factors + (head * s.T + t) * n;
  for (int64_t i = 0; i < n; i += V::W) {
    const V::F kept = V::load(factors + i, V::W);
    V::store(key + i, V::load(key + i, V::W) * kept, V::W);
    V::store(key + n + i, V::load(key + n + i, V::W) * kept, V::W);
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
    if (!s.a_by_column) read_steps(s, b, s.past.a, shared.path_a);
    for (int64_t i = 0; i < s.M * s.H; i++) shared.path_dt[i] = 1.0f;  // in the keys
    write_gates(d, b, shared);
  }
  read_path<L>(s, b, g, shared);
  if (s.a_by_column) {
    read_path_factors<L>(s, b, g, shared);
    write_factors<L>(d, b, g, shared);
  }
  normalize_path(s, b, g, n, shared);
  E* const keys = static_cast<E*>(d.B) + (b * s.now.capacity * s.G + g) * s.N;
  const int64_t of_q = g * s.N, of_k = (s.G + g) * s.N;
  move_window<E>(d, b, of_q, s.N);
  move_window<E>(d, b, of_k, s.N);
  convolve<L, E>(d, b, of_k, s.N, [&](int64_t, int64_t t, int64_t i, auto x) TARGET {
    V::store(keys + t * s.G * s.N + i, x, s.N - i);
  });
  float* const C = shared.C + g * s.Tq * 2 * n;
  convolve<L, E>(d, b, of_q, s.N, [&](int64_t q, int64_t, int64_t i, auto x) TARGET {
    V::store(C + (2 * place_of(s, b, q) + 1) * n + i, V::rounded(x, keys), n - i);
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
    float* const key = C + 2 * place_of(s, b, q) * n;
    float* const query = key + n;
    __builtin_memcpy(key, B + t * n, n * sizeof(float));
    scale_row(query, query, normalizing(query, n) * root, n);
  }
  score_queries<L>(s, b, g, shared);
  for (int64_t q = 0; s.a_by_column && q < s.queries[b]; q++)
    if (node_of(s, q) < s.T)
      decay_query<L>(s, g, node_of(s, q), C + 2 * place_of(s, b, q) * n, shared);
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

// Computes the outputs of the queried nodes, normed and gated, and writes their u to the record;
// own.x holds u:
//
//   u_t = beta_t (v_t - exp(a_t) S k_t)
//   y_t = exp(a_t) S q_t + (q_t . k_t) u_t
//
// where S is the state of t's parent.
TARGET inline void write_nodes(const Delta& d, int64_t b, int64_t head, const Shared& shared,
                               const Own& own) {
  using V = Lanes;
  const Scan& s = d.scan;
  const int64_t p = rounded_up(s.P, 16), g = head / (s.H / s.G);
  float* const record = static_cast<float*>(d.x);
  for (int64_t q = 0; q < s.queries[b]; q++) {
    const int64_t t = node_of(s, q), place = place_of(s, b, q);
    float* const y = s.y + ((b * s.Tq + q) * s.H + head) * s.P;
    if (t >= s.T) {
      for (int64_t j = 0; j < s.P; j++) y[j] = 0.0f;
      continue;
    }
    const float* const carried = own.carried + (2 * place + 1) * p;
    const V::F score = V::F{} + shared.scores[g * s.Tq + place], decay = V::F{} + own.decay[t];
    float* const u = record + ((b * s.now.capacity + t) * s.H + head) * s.P;
    for (int64_t j = 0; j < s.P; j += V::W) {
      const V::F added = V::load(own.x + t * p + j, s.P - j);
      V::store(u + j, added, s.P - j);
      V::store(own.y + j, V::fma(score, added, decay * V::load(carried + j, s.P - j)), V::W);
    }
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
  own_layout<L>(s, static_cast<char*>(scratch), &own);
  read_past(s, b, head, shared, own);  // before u is overwritten
  if (s.rows) read_x(s, b, head, own);
  move_window<E>(d, b, channel, s.P);
  convolve<L, E>(d, b, channel, s.P, [&](int64_t, int64_t t, int64_t i, auto v) TARGET {
    V::store(own.x + t * p + i, V::rounded(v, static_cast<const E*>(nullptr)), p - i);
  });
  fetch_inputs(d, b, d.to_z + head * s.P, s.P);
  fetch_record(d, b, head);
  if (next >= 0) fetch_inputs(d, next / s.H, d.to_inputs + of_v + next % s.H * s.P, s.P);
  if (s.a_by_column) {  // keys and queries have the decays already
    for (int64_t t = 0; t < s.nodes[b]; t++) own.decay[t] = 1.0f;
  } else {
    read_decays(s, b, head, own);
  }
  walk_head<L>(s, b, head, next, shared, own, [&](int64_t from, int64_t end, int64_t i) TARGET {
    typedef float Four __attribute__((vector_size(4 * COLUMNS)));
    for (int64_t place = from; place < end; place++) {
      const int64_t q = s.query[b * s.Tq + place], t = node_of(s, q);
      Four v, known;
      float* const x = own.x + t * p + i;
      __builtin_memcpy(&v, x, sizeof v);
      __builtin_memcpy(&known, own.carried + 2 * place * p + i, sizeof known);
      v = shared.of_queries[q * s.H + head] * (v - own.decay[t] * known);
      __builtin_memcpy(x, &v, sizeof v);
    }
  });
  write_nodes(d, b, head, shared, own);
}

template <class L>
TARGET void delta_head(const Delta& d, void* base, void* own, int64_t head, int64_t next) {
  d.scan.bf16 ? head_of<L, uint16_t>(d, base, own, head, next)
              : head_of<L, float>(d, base, own, head, next);
}

template <class L>
TARGET int64_t delta_own_bytes(const Delta& d) {
  return own_bytes<L>(d.scan);
}

template <class L>
TARGET int64_t delta_shared_bytes(const Delta& d) {
  return shared_bytes<L>(d.scan);
}

template <class L>
constexpr MixerKernel<Delta> delta_kernel() {
  return {delta_shared_bytes<L>, delta_own_bytes<L>, delta_group<L>, delta_head<L>, nullptr};
}
