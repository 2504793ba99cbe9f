// Lanes of AVX-512; included inside a namespace, with TARGET defined.

TARGET inline void store_sums(float* out, const __m512 (&sum)[4], int count) {
  // Halves, then quarters of each sum are added; quarter c of `parts` is column c's.
  const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(sum[0], sum[1], 0x44),
                                  _mm512_shuffle_f32x4(sum[0], sum[1], 0xEE));
  const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(sum[2], sum[3], 0x44),
                                  _mm512_shuffle_f32x4(sum[2], sum[3], 0xEE));
  __m512 parts = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88),
                               _mm512_shuffle_f32x4(ab, cd, 0xDD));
  parts = _mm512_add_ps(parts, _mm512_permute_ps(parts, 0xB1));
  parts = _mm512_add_ps(parts, _mm512_permute_ps(parts, 0x4E));
  const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m128 sums = _mm512_castps512_ps128(_mm512_permutexvar_ps(first, parts));
  _mm_mask_storeu_ps(out, static_cast<__mmask8>((1 << count) - 1), sums);
}

struct Float32 {
  using Weight = float;
  using Row = float;
  using Sum = __m512;
  using Loaded = __m512;
  static constexpr int step = 16, most_rows = 6;
  TARGET static inline float as_row(float x) { return x; }
  TARGET static inline Sum zero() { return _mm512_setzero_ps(); }
  TARGET static inline Loaded weight(const float* w) { return _mm512_loadu_ps(w); }
  TARGET static inline Loaded weight_tail(const float* w, int count) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), w);
  }
  TARGET static inline Loaded row(const float* x) { return _mm512_loadu_ps(x); }
  TARGET static inline Sum dot(Sum sum, Loaded w, Loaded x) {
    return _mm512_fmadd_ps(w, x, sum);
  }
  TARGET static inline void store(float* out, const Sum (&sum)[4], int count) {
    store_sums(out, sum, count);
  }
  // For the scan.
  TARGET static inline Loaded all(float x) { return _mm512_set1_ps(x); }
  TARGET static inline Loaded times(Loaded a, Loaded b) { return _mm512_mul_ps(a, b); }
  TARGET static inline void put(float* to, Loaded x) { _mm512_storeu_ps(to, x); }
  TARGET static inline void put_tail(float* to, Loaded x, int count) {
    _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), x);
  }
};
