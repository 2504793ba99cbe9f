// A Mamba2 mixer between its projections. Include after conv_body.h.
//
// The reference implementation in JAX is `equations` in models/mixers/mamba2.py. Channels do not
// mix before the scan, so one thread does all work of a head, or of a group's B and C.

// Computes dt and the log decays of the queried nodes.
TARGET inline void write_steps(const Mamba2& m, int64_t b) {
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

// Computes B and C of a group. The first group also prepares what all groups share.
template <class L, class E>
TARGET void group_of(const Mamba2& m, void* base, int64_t b, int64_t g) {
  using V = Lanes;
  const Scan& s = m.scan;
  const Shared shared = shared_of<L>(s, base, b);
  const int64_t n = rounded_up(s.N, L::step);
  if (g == 0) {
    read_steps(s, b, s.past.dt, shared.path_dt);
    read_steps(s, b, s.past.a, shared.path_a);
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
  convolve<L, E>(m, b, of_C, s.N, [&](int64_t q, int64_t, int64_t i, auto x) TARGET {
    V::store(C + place_of(s, b, q) * n + i, V::rounded(x, B), n - i);
  });
  read_B<L>(s, b, g, shared);
  score_queries<L>(s, b, g, shared);
}

template <class L>
TARGET void mixer_group(const Mamba2& m, void* base, int64_t b, int64_t g) {
  m.scan.bf16 ? group_of<L, uint16_t>(m, base, b, g) : group_of<L, float>(m, base, b, g);
}

// Computes y = y * silu(z), and the sums of squares for the norm.
template <class L>
TARGET void gate_head(const Mamba2& m, int64_t b, int64_t head, const Shared& shared) {
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
    shared.of_queries[q * s.H + head] = V::sum(squares);
  }
}

template <class L, class E>
TARGET void head_of(const Mamba2& m, void* base, void* scratch, int64_t place, int64_t next) {
  using V = Lanes;
  const Scan& s = m.scan;
  const int64_t b = place / s.H, head = place % s.H, channel = head * s.P;
  const Shared shared = shared_of<L>(s, base, b);
  Own own;
  own_layout<L>(s, static_cast<char*>(scratch), &own);
  read_past(s, b, head, shared, own);  // before x is overwritten
  E* const x = static_cast<E*>(m.x) + (b * s.now.capacity * s.H + head) * s.P;
  move_window<E>(m, b, channel, s.P);
  convolve<L, E>(m, b, channel, s.P, [&](int64_t, int64_t t, int64_t i, auto of) TARGET {
    V::store(x + t * s.H * s.P + i, of, s.P - i);
  });
  fetch_inputs(m, b, m.to_z + channel, s.P);
  if (next >= 0) fetch_inputs(m, next / s.H, m.to_inputs + next % s.H * s.P, s.P);
  scan_nodes<L>(s, b, head, next, shared, own);
  gate_head<L>(m, b, head, shared);
}

template <class L>
TARGET void mixer_head(const Mamba2& m, void* base, void* own, int64_t head, int64_t next) {
  m.scan.bf16 ? head_of<L, uint16_t>(m, base, own, head, next)
              : head_of<L, float>(m, base, own, head, next);
}

// Norms a query's channels, in groups of whole heads.
template <class L>
TARGET void mixer_norm(const Mamba2& m, void* base, int64_t b, int64_t q) {
  const Scan& s = m.scan;
  if (!m.norm || q >= s.queries[b]) return;
  const Shared shared = shared_of<L>(s, base, b);
  const int64_t heads = s.H / m.norm_groups, size = heads * s.P;
  for (int64_t g = 0; g < m.norm_groups; g++) {
    double sum = 0.0;
    for (int64_t h = 0; h < heads; h++) sum += shared.of_queries[q * s.H + g * heads + h];
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

template <class L>
TARGET int64_t mixer_own_bytes(const Mamba2& m) {
  return own_bytes<L>(m.scan);
}

template <class L>
TARGET int64_t mixer_shared_bytes(const Mamba2& m) {
  return shared_bytes<L>(m.scan);
}

template <class L>
constexpr MixerKernel<Mamba2> mixer_kernel() {
  return {mixer_shared_bytes<L>, mixer_own_bytes<L>, mixer_group<L>, mixer_head<L>,
          mixer_norm<L>};
}
