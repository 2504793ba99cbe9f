// Dot products of bfloat16 with float32 sums. Include inside a namespace, with TARGET defined,
// after avx512_lanes.h.

struct Bfloat16Dots {
  using Weight = uint16_t;
  using Row = uint16_t;
  using Sum = __m512;
  using Loaded = __m512bh;
  static constexpr int step = 32, most_rows = 6;
  TARGET static inline uint16_t as_row(float x) { return bfloat16_of(x); }
  TARGET static inline Sum zero() { return _mm512_setzero_ps(); }
  TARGET static inline Loaded weight(const uint16_t* w) {
    return (__m512bh)_mm512_loadu_si512(w);
  }
  TARGET static inline Loaded weight_tail(const uint16_t* w, int count) {
    return (__m512bh)_mm512_maskz_loadu_epi16((1u << count) - 1, w);
  }
  TARGET static inline Loaded row(const uint16_t* x) { return weight(x); }
  TARGET static inline Sum dot(Sum sum, Loaded w, Loaded x) {
    return _mm512_dpbf16_ps(sum, w, x);
  }
  TARGET static inline void store(float* out, const Sum (&sum)[4], int count) {
    store_sums(out, sum, count);
  }
};
