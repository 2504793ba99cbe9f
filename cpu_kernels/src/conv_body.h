// The convolution of a recurrent mixer, along the paths of a tree. Include after scan_body.h.
//
// Channels do not mix here, so one thread does all work of a channel: it advances the window,
// writes the inputs to the record and convolves them. The arrays of the last tree may be those of
// this one: a thread reads the path's values of a channel before it overwrites the channel.

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
  const E* inputs = static_cast<const E*>(m.past_inputs) + b * s.past.capacity * C + channel;
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
    E* const inputs = static_cast<E*>(m.inputs) + b * s.now.capacity * C + at;
    Taps taps[TOGETHER];
    for (int64_t i = 0; i < count; i += V::W) read_taps(m, at + i, count - i, taps[i / V::W]);
    for (int64_t q = 0; q < s.queries[b]; q++) {
      const int64_t t = node_of(s, q);
      if (t >= T) continue;
      const float* in = m.in + (b * s.Tq + q) * m.width + m.to_inputs + at;
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

// Prefetches `size` numbers of in_proj's output, from `first` on, of all queries. They may be in
// the cache of another core, which computed them.
TARGET inline void fetch_inputs(const Mixer& m, int64_t b, int64_t first, int64_t size) {
  for (int64_t q = 0; q < m.scan.queries[b]; q++) {
    const float* in = m.in + (b * m.scan.Tq + q) * m.width + first;
    for (int64_t i = 0; i < size; i += 16) __builtin_prefetch(in + i);
  }
}
