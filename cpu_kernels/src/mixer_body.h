// What stands between a Mamba2 mixer's projections; after scan_body.h.
//
// Defined by models/mamba2.py, `definition`. Channels do not mix before the scan, so a
// thread does all of a head, or of a group's B and C: the window of the convolution moves
// on, inputs are written down, convolved, scanned. The last tree's arrays may be this
// one's: what is read of a path is read before its channels are written.

// dt and log decays of the queried nodes.
TARGET inline void write_steps(const Mixer& m, int64_t b) {
  using V = Lanes;
  const Scan& s = m.scan;
  for (int64_t q = 0; q < s.queries[b]; q++) {
    const int64_t t = node_of(s, q), row = b * s.now.room + t;
    if (t >= s.T) continue;
    const float* in = m.in + (b * s.Tq + q) * m.width + m.to_dt;
    float* dt = m.dt + row * s.H;
    float* a = m.a + row * s.H;
    for (int64_t h = 0; h < s.H; h += V::W) {
      const int64_t count = s.H - h;
      auto step = V::softplus(V::load(in + h, count) + V::load(m.dt_bias + h, count));
      step = step < V::F{} + m.least_dt ? V::F{} + m.least_dt : step;
      step = step > V::F{} + m.most_dt ? V::F{} + m.most_dt : step;
      V::store(dt + h, step, count);
      V::store(a + h, -step * V::exp(V::load(m.A_log + h, count)), count);
    }
  }
}

constexpr int MOST_TAPS = 16;

// Weights [W, K] of the taps of W channels, of which `size` are there, and their bias.
template <class E>
TARGET inline Lanes::F read_taps(const E* weight, const E* bias, int64_t K, int64_t size,
                                 Lanes::F (&taps)[MOST_TAPS]) {
  using V = Lanes;
  float by_tap[MOST_TAPS][V::W];
  if (K == 4 && size >= V::W) {
    for (int i = 0; i < V::W; i += V::W / 4) {  // of the size of a vector of taps
      float row[V::W];
      V::store(row, V::load(weight + 4 * i, V::W), V::W);
      for (int j = 0; j < V::W; j++) by_tap[j % 4][i + j / 4] = row[j];
    }
  } else {
    for (int64_t i = 0; i < size && i < V::W; i++)
      for (int64_t k = 0; k < K; k++) by_tap[k][i] = V::load(weight + i * K + k, 1)[0];
  }
  for (int64_t k = 0; k < K; k++) taps[k] = V::load(by_tap[k], size);
  return bias ? V::load(bias, size) : V::F{};
}

TARGET inline Lanes::F read_taps(const Mixer& m, int64_t channel, int64_t size,
                                 Lanes::F (&taps)[MOST_TAPS]) {
  const auto read = [&](auto* weight) TARGET {
    const auto* bias = static_cast<decltype(weight)>(m.conv_bias);
    weight += channel * m.scan.K;
    return read_taps(weight, bias ? bias + channel : bias, m.scan.K, size, taps);
  };
  return m.weights_bf16 ? read(static_cast<const uint16_t*>(m.conv_weight))
                        : read(static_cast<const float*>(m.conv_weight));
}

// The window of the convolution after the path, of `size` channels.
template <class E>
TARGET void move_window(const Mixer& m, int64_t b, int64_t channel, int64_t size) {
  const Scan& s = m.scan;
  const int64_t C = m.channels, K1 = s.K - 1, length = path_length(s, b);
  const E* before = static_cast<const E*>(m.conv0) + b * K1 * C + channel;
  const E* inputs = static_cast<const E*>(m.past_xBC) + b * s.past.room * C + channel;
  E* after = static_cast<E*>(m.conv) + b * K1 * C + channel;
  for (int64_t i = 0; i < K1; i++) {
    const int64_t from = i + length;
    const E* row = from < K1 ? before + from * C
                             : inputs + s.path[b * s.M + from - K1] * C;
    E* to = after + i * C;
    if (row != to) __builtin_memcpy(to, row, size * sizeof(E));
  }
}

// silu of the convolution of the queried nodes' inputs, of `size` channels, which are
// written down first; out(query, node, i, silu of channels i to i + W).
template <class L, class E, class Out>
TARGET inline __attribute__((always_inline)) void convolve(
    const Mixer& m, int64_t b, int64_t channel, int64_t size, const Out& out) {
  using V = Lanes;
  const Scan& s = m.scan;
  const int64_t T = s.T, C = m.channels, K1 = s.K - 1;
  const E* before = static_cast<const E*>(m.conv) + b * K1 * C + channel;
  E* inputs = static_cast<E*>(m.xBC) + b * s.now.room * C + channel;
  for (int64_t i = 0; i < size; i += V::W) {
    const int64_t count = size - i;
    for (int64_t q = 0; q < s.queries[b]; q++) {
      const int64_t t = node_of(s, q);
      const float* in = m.in + (b * s.Tq + q) * m.width + m.to_xBC + channel + i;
      if (t < T) V::store(inputs + t * C + i, V::load(in, count), count);
    }
    V::F weight[MOST_TAPS];
    const auto bias = read_taps(m, channel + i, count, weight);
    for (int64_t q = 0; q < s.queries[b]; q++) {
      const int64_t t = node_of(s, q);
      if (t >= T) continue;
      const int32_t* window = m.window + (b * T + t) * s.K;
      auto sum = bias;
      for (int64_t k = 0; k <= K1; k++) {
        const int64_t w = window[k];
        const E* row = w < K1 ? before + w * C : inputs + (w - K1) * C;
        sum = L::dot(sum, weight[k], V::load(row + i, count));
      }
      out(q, t, i, V::silu(sum));
    }
  }
}

// B and C of a group; the first one prepares for all.
template <class L, class E>
TARGET void group_of(const Mixer& m, void* base, int64_t b, int64_t g) {
  using V = Lanes;
  const Scan& s = m.scan;
  const Shared shared = shared_of<L>(s, base, b);
  const int64_t n = rounded_up(s.N, L::step);
  if (g == 0) {
    find_ancestors(s, b, shared);
    read_steps(s, b, shared);
    write_steps(m, b);
  }
  read_path<L>(s, b, g, shared);
  E* const B = static_cast<E*>(m.B) + (b * s.now.room * s.G + g) * s.N;
  const int64_t of_B = s.H * s.P + g * s.N, of_C = of_B + s.G * s.N;
  move_window<E>(m, b, of_B, s.N);
  move_window<E>(m, b, of_C, s.N);
  convolve<L, E>(m, b, of_B, s.N, [&](int64_t, int64_t t, int64_t i, auto x) TARGET {
    V::store(B + t * s.G * s.N + i, x, s.N - i);
  });
  float* const C = shared.C + g * s.Tq * n;
  for (int64_t i = 0; s.rows && i < s.Tq * n; i++) C[i] = 0.0f;
  convolve<L, E>(m, b, of_C, s.N, [&](int64_t q, int64_t, int64_t i, auto x) TARGET {
    V::store(C + q * n + i, V::rounded(x, B), n - i);
  });
  read_B<L>(s, b, g, shared);
}

template <class L>
TARGET void mixer_group(const Mixer& m, void* base, int64_t b, int64_t g) {
  m.scan.bf16 ? group_of<L, uint16_t>(m, base, b, g) : group_of<L, float>(m, base, b, g);
}

// y = y * silu(z), and sums of squares for the norm.
template <class L>
TARGET void gate_head(const Mixer& m, int64_t b, int64_t head, const Shared& shared) {
  using V = Lanes;
  const Scan& s = m.scan;
  for (int64_t q = 0; q < s.queries[b]; q++) {
    const float* z = m.in + (b * s.Tq + q) * m.width + m.to_z + head * s.P;
    float* y = s.y + ((b * s.Tq + q) * s.H + head) * s.P;
    auto squares = L::zero();
    for (int64_t i = 0; i < s.P; i += V::W) {
      const auto before = V::load(y + i, s.P - i);
      const auto after = before * V::silu(V::load(z + i, s.P - i));
      V::store(y + i, after, s.P - i);
      const auto normed = m.norm_first ? before : after;
      squares = L::dot(squares, normed, normed);
    }
    shared.squares[q * s.H + head] = V::sum(squares);
  }
}

// What in_proj gave is in the caches of whoever computed it: `size` of its numbers, from `first`
// on, of all queries, are fetched before they are wanted.
TARGET inline void fetch_inputs(const Mixer& m, int64_t b, int64_t first, int64_t size) {
  for (int64_t q = 0; q < m.scan.queries[b]; q++) {
    const float* in = m.in + (b * m.scan.Tq + q) * m.width + first;
    for (int64_t i = 0; i < size; i += 16) __builtin_prefetch(in + i);
  }
}

template <class L, class E>
TARGET void head_of(const Mixer& m, void* base, void* scratch, int64_t b, int64_t head) {
  using V = Lanes;
  const Scan& s = m.scan;
  const Shared shared = shared_of<L>(s, base, b);
  Own own;
  own_layout(s, static_cast<char*>(scratch), &own);
  const int64_t channel = head * s.P;
  fetch_inputs(m, b, m.to_xBC + channel, s.P);
  const float kept = path_weights(s, b, head, shared, own);  // reads x, then it may go
  E* const x = static_cast<E*>(m.x) + (b * s.now.room * s.H + head) * s.P;
  move_window<E>(m, b, channel, s.P);
  convolve<L, E>(m, b, channel, s.P, [&](int64_t, int64_t t, int64_t i, auto of) TARGET {
    V::store(x + t * s.H * s.P + i, of, s.P - i);
  });
  fetch_inputs(m, b, m.to_z + channel, s.P);
  if (head + 1 < s.H) fetch_inputs(m, b, m.to_xBC + channel + s.P, s.P);
  replay_head<L>(s, b, head, kept, shared, own);
  read_nodes(s, b, head, shared, own);
  write_outputs(s, b, head, shared, own);
  gate_head<L>(m, b, head, shared);
}

template <class L>
TARGET void mixer_head(const Mixer& m, void* base, void* own, int64_t b, int64_t head) {
  m.scan.bf16 ? head_of<L, uint16_t>(m, base, own, b, head)
              : head_of<L, float>(m, base, own, b, head);
}

// The norm of a query's channels, by groups of whole heads.
template <class L>
TARGET void mixer_norm(const Mixer& m, void* base, int64_t b, int64_t q) {
  const Scan& s = m.scan;
  if (!m.norm || q >= s.queries[b]) return;
  const Shared shared = shared_of<L>(s, base, b);
  const int64_t heads = s.H / m.norm_groups, size = heads * s.P;
  for (int64_t g = 0; g < m.norm_groups; g++) {
    double sum = 0.0;
    for (int64_t h = 0; h < heads; h++) sum += shared.squares[q * s.H + g * heads + h];
    const float mean = static_cast<float>(sum / static_cast<double>(size));
    const float factor = 1.0f / __builtin_sqrtf(mean + m.eps);
    float* y = s.y + (b * s.Tq + q) * s.H * s.P + g * size;
    if (m.weights_bf16) {
      const uint16_t* scale = static_cast<const uint16_t*>(m.norm) + g * size;
      for (int64_t i = 0; i < size; i++) y[i] = y[i] * factor * widened(scale[i]);
    } else {
      const float* scale = static_cast<const float*>(m.norm) + g * size;
      for (int64_t i = 0; i < size; i++) y[i] = y[i] * factor * scale[i];
    }
  }
}

TARGET inline int64_t mixer_own_bytes(const Mixer& m) { return own_bytes(m.scan); }

template <class L>
TARGET int64_t mixer_shared_bytes(const Mixer& m) {
  return shared_bytes<L>(m.scan);
}

template <class L>
constexpr MixerKernel mixer_kernel() {
  return {mixer_shared_bytes<L>, mixer_own_bytes, mixer_group<L>, mixer_head<L>,
          mixer_norm<L>};
}
