// The replay of the last path and the selective scan of Mamba-1. Include after lanes.h.
//
// The reference implementation in JAX is in pallas_kernels/selective.py. A thread takes a vector of
// channels: it replays their state, then computes the nodes in order, each from the state of its
// parent. The states of all nodes stay in the cache and are not stored. A node's output depends on
// its ancestors alone, bit for bit.

// Computes the state after a token from its parent's state; both are [N, W].
TARGET inline void next_state(const Selective& s, const float* A, Lanes::F dt, Lanes::F x,
                              const float* B, int64_t left, const float* before, float* after) {
  using V = Lanes;
  const V::F added = dt * x;
  for (int64_t n = 0; n < s.N; n++) {
    const V::F kept = V::exp(dt * V::load(A + n * s.D, left));
    const V::F h = V::load(before + n * V::W, V::W);
    V::store(after + n * V::W, V::fma(added, B[n], kept * h), V::W);
  }
}

TARGET inline Lanes::F selective_x(const Selective& s, const void* x, int64_t at, int64_t left) {
  return s.bf16 ? Lanes::load(static_cast<const uint16_t*>(x) + at, left)
                : Lanes::load(static_cast<const float*>(x) + at, left);
}

TARGET inline int64_t selective_bytes(const Selective& s) {
  const int64_t states = s.chain || s.T == 0 ? 2 : s.T + 1;
  return states * s.N * Lanes::W * static_cast<int64_t>(sizeof(float));
}

// Computes channels [begin, begin + W) of batch row b.
TARGET inline void selective_block(const Selective& s, void* own, int64_t b, int64_t begin) {
  using V = Lanes;
  const int64_t left = s.D - begin, size = s.N * V::W;
  const float* const A = s.A + b * s.N * s.D + begin;
  float* const states = static_cast<float*>(own);  // row t + 1 has the state of node t
  for (int64_t n = 0; n < s.N; n++)
    V::store(states + n * V::W, V::load(s.h0 + (b * s.N + n) * s.D + begin, left), V::W);
  const int64_t length = s.h == nullptr ? 0 : s.length[b] < s.M ? s.length[b] : s.M;
  for (int64_t j = 0; j < length; j++) {
    const int64_t row = b * s.capacity + s.path[b * s.M + j], at = row * s.D + begin;
    next_state(s, A, V::load(s.past_dt + at, left), selective_x(s, s.past_x, at, left),
               s.past_B + row * s.N, left, states, states);
  }
  if (s.h != nullptr && (length > 0 || s.h != s.h0))
    for (int64_t n = 0; n < s.N; n++)
      V::store(s.h + (b * s.N + n) * s.D + begin, V::load(states + n * V::W, V::W), left);
  for (int64_t t = 0; t < s.T; t++) {
    const int64_t row = b * s.T + t, at = row * s.D + begin;
    const int32_t query = s.query[row];
    if (query == UNUSED_NODE) continue;
    const int64_t parent = s.chain ? -1 : s.parents[row];
    float* const after = s.chain ? states : states + (t + 1) * size;
    const V::F x = selective_x(s, s.x, at, left);
    next_state(s, A, V::load(s.dt + at, left), x, s.B + row * s.N, left,
               states + (parent + 1) * size, after);
    if (query < 0) continue;
    const float* const C = s.C + (b * s.Tq + query) * s.N;
    V::F y = V::load(s.skip + begin, left) * x;
    for (int64_t n = 0; n < s.N; n++) y = V::fma(V::load(after + n * V::W, V::W), C[n], y);
    V::store(s.y + (b * s.Tq + query) * s.D + begin, y, left);
  }
}

constexpr SelectiveKernel selective_kernel() {
  return {selective_bytes, selective_block, Lanes::W};
}
