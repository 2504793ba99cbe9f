// A Mamba2 mixer between its projections. Include after scan_body.h.
//
// The reference implementation in JAX is `equations` in models/mixers/mamba2.py. Channels do not
// mix before the scan, so one thread does all work of a head, or of a group's B and C: it advances
// the convolution's window, writes the inputs to the record, convolves and scans them. The arrays
// of the last tree may be those of this one: a thread reads the path's values of a channel before
// it overwrites the channel.

// Computes dt and the log decays of the queried nodes.
TARGET inline void write_steps(const Mixer& m, int64_t b) {
  using V = Lanes;
  const Scan& s = m.scan;
  for (int64_t q = 0; q < s.queries[b]; q++) {
    const int64_t t = node_of(s, q), row = b * s.now.capacity + t;
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

constexpr int MAX_TAPS = 16;
constexpr int TOGETHER = 4;  // at most this many vectors of channels are convolved together

// Convolution weights of W channels by tap, and their bias.
struct Taps {
  Lanes::F of[MAX_TAPS], bias;
};

// Reads the weights [W, K] of W channels. Only the first `size` channels are valid.
template <class E>
TARGET inline void read_taps(const E* weight, const E* bias, int64_t K, int64_t size, Taps& taps) {
  using V = Lanes;
  if (K == 4 && size >= V::W) {
    V::F rows[4];
    for (int i = 0; i < 4; i++) rows[i] = V::load(weight + i * V::W, V::W);
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) taps.of[k] = V::every_fourth(rows, k);
  } else {
    float by_tap[MAX_TAPS][V::W];
    for (int64_t i = 0; i < size && i < V::W; i++)
      for (int64_t k = 0; k < K; k++) by_tap[k][i] = V::load(weight + i * K + k, 1)[0];
    for (int64_t k = 0; k < K; k++) taps.of[k] = V::load(by_tap[k], size);
  }
  taps.bias = bias ? V::load(bias, size) : V::F{};
}

TARGET inline void read_taps(const Mixer& m, int64_t channel, int64_t size, Taps& taps) {
  const auto read = [&](auto* weight) TARGET {
    const auto* bias = static_cast<decltype(weight)>(m.conv_bias);
    weight += channel * m.scan.K;
    read_taps(weight, bias ? bias + channel : bias, m.scan.K, size, taps);
  };
  m.weights_bf16 ? read(static_cast<const uint16_t*>(m.conv_weight))
                 : read(static_cast<const float*>(m.conv_weight));
}

// Advances the convolution's window past the path, for `size` channels.
template <class E>
TARGET void move_window(const Mixer& m, int64_t b, int64_t channel, int64_t size) {
  const Scan& s = m.scan;
  const int64_t C = m.channels, K1 = s.K - 1, length = path_length(s, b);
  const E* before = static_cast<const E*>(m.conv0) + b * K1 * C + channel;
  const E* inputs = static_cast<const E*>(m.past_xBC) + b * s.past.capacity * C + channel;
  E* after = static_cast<E*>(m.conv) + b * K1 * C + channel;
  for (int64_t i = 0; i < K1; i++) {
    const int64_t from = i + length;
    const E* row = from < K1 ? before + from * C
                             : inputs + s.path[b * s.M + from - K1] * C;
    E* to = after + i * C;
    if (row != to) __builtin_memcpy(to, row, size * sizeof(E));
  }
}

// Writes the queried nodes' inputs of `size` channels to the record, convolves them, and calls
// out(query, node, i, silu of channels i to i + W).
template <class L, class E, class Out>
TARGET inline __attribute__((always_inline)) void convolve(
    const Mixer& m, int64_t b, int64_t channel, int64_t size, const Out& out) {
  using V = Lanes;
  const Scan& s = m.scan;
  const int64_t T = s.T, C = m.channels, K1 = s.K - 1;
  for (int64_t first = 0; first < size; first += TOGETHER * V::W) {
    const int64_t at = channel + first, left = size - first;
    const int64_t count = left < TOGETHER * V::W ? left : TOGETHER * V::W;
    const E* const before = static_cast<const E*>(m.conv) + b * K1 * C + at;
    E* const inputs = static_cast<E*>(m.xBC) + b * s.now.capacity * C + at;
    Taps taps[TOGETHER];
    for (int64_t i = 0; i < count; i += V::W) read_taps(m, at + i, count - i, taps[i / V::W]);
    for (int64_t q = 0; q < s.queries[b]; q++) {
      const int64_t t = node_of(s, q);
      if (t >= T) continue;
      const float* in = m.in + (b * s.Tq + q) * m.width + m.to_xBC + at;
      for (int64_t i = 0; i < count; i += V::W)
        V::store(inputs + t * C + i, V::load(in + i, count - i), count - i);
    }
    for (int64_t q = 0; q < s.queries[b]; q++) {
      const int64_t t = node_of(s, q);
      if (t >= T) continue;
      const E* rows[MAX_TAPS];
      for (int64_t k = 0; k <= K1; k++) {
        const int64_t w = m.window[(b * T + t) * s.K + k];
        rows[k] = w < K1 ? before + w * C : inputs + (w - K1) * C;
      }
      for (int64_t i = 0; i < count; i += V::W) {
        const Taps& tap = taps[i / V::W];
        auto sum = tap.bias;
        for (int64_t k = 0; k <= K1; k++)
          sum = L::dot(sum, tap.of[k], V::load(rows[k] + i, count - i));
        out(q, t, first + i, V::silu(sum));
      }
    }
  }
}

// Computes B and C of a group. The first group also prepares what all groups share.
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
  E* const B = static_cast<E*>(m.B) + (b * s.now.capacity * s.G + g) * s.N;
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

// Computes y = y * silu(z), and the sums of squares for the norm.
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

// Prefetches `size` numbers of in_proj's output, from `first` on, of all queries. They may be in
// the cache of another core, which computed them.
TARGET inline void fetch_inputs(const Mixer& m, int64_t b, int64_t first, int64_t size) {
  for (int64_t q = 0; q < m.scan.queries[b]; q++) {
    const float* in = m.in + (b * m.scan.Tq + q) * m.width + first;
    for (int64_t i = 0; i < size; i += 16) __builtin_prefetch(in + i);
  }
}

template <class L, class E>
TARGET void head_of(const Mixer& m, void* base, void* scratch, int64_t place, int64_t next) {
  using V = Lanes;
  const Scan& s = m.scan;
  const int64_t b = place / s.H, head = place % s.H, channel = head * s.P;
  const Shared shared = shared_of<L>(s, base, b);
  Own own;
  own_layout(s, static_cast<char*>(scratch), &own);
  const float kept = path_weights(s, b, head, shared, own);  // before x is overwritten
  E* const x = static_cast<E*>(m.x) + (b * s.now.capacity * s.H + head) * s.P;
  move_window<E>(m, b, channel, s.P);
  convolve<L, E>(m, b, channel, s.P, [&](int64_t, int64_t t, int64_t i, auto of) TARGET {
    V::store(x + t * s.H * s.P + i, of, s.P - i);
  });
  fetch_inputs(m, b, m.to_z + channel, s.P);
  if (next >= 0) fetch_inputs(m, next / s.H, m.to_xBC + next % s.H * s.P, s.P);
  replay_head<L>(s, b, head, next, kept, shared, own);
  read_nodes(s, b, head, shared, own);
  write_outputs(s, b, head, shared, own);
  gate_head<L>(m, b, head, shared);
}

template <class L>
TARGET void mixer_head(const Mixer& m, void* base, void* own, int64_t head, int64_t next) {
  m.scan.bf16 ? head_of<L, uint16_t>(m, base, own, head, next)
              : head_of<L, float>(m, base, own, head, next);
}

// Norms a query's channels, in groups of whole heads.
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
