// Vectors of AVX-512. Include inside a namespace, with TARGET defined.

TARGET inline void store_sums(float* out, const __m512 (&sum)[4], int count) {
  // Add the halves of each sum, then the quarters; quarter c of `parts` belongs to column c.
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
  // Used by the scan.
  TARGET static inline Loaded all(float x) { return _mm512_set1_ps(x); }
  TARGET static inline Loaded times(Loaded a, Loaded b) { return _mm512_mul_ps(a, b); }
  TARGET static inline void put(float* to, Loaded x) { _mm512_storeu_ps(to, x); }
  TARGET static inline void put_tail(float* to, Loaded x, int count) {
    _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), x);
  }
};

struct Bfloat16 : Float32 {
  using Weight = uint16_t;
  TARGET static inline float as_row(float x) { return widened(bfloat16_of(x)); }
  TARGET static inline Loaded widen(__m256i halves) {
    const __m512i words = _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
    return _mm512_castsi512_ps(words);
  }
  TARGET static inline Loaded weight(const uint16_t* w) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)));
  }
  TARGET static inline Loaded weight_tail(const uint16_t* w, int count) {
    const auto mask = static_cast<__mmask16>((1u << count) - 1);
    return widen(_mm256_maskz_loadu_epi16(mask, w));
  }
};

// Transposes 16 x 16 numbers.
TARGET inline void transpose_block(__m512 (&x)[16]) {
  __m512 y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
  const auto low = [](__m512 a, __m512 b) TARGET {
    return _mm512_castpd_ps(
        _mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  const auto high = [](__m512 a, __m512 b) TARGET {
    return _mm512_castpd_ps(
        _mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  for (int i = 0; i < 16; i += 4) {
    x[i] = low(y[i], y[i + 2]), x[i + 1] = high(y[i], y[i + 2]);
    x[i + 2] = low(y[i + 1], y[i + 3]), x[i + 3] = high(y[i + 1], y[i + 3]);
  }
  for (int i = 0; i < 4; i++) {  // quarters
    const __m512 a = _mm512_shuffle_f32x4(x[i], x[i + 4], 0x88);
    const __m512 b = _mm512_shuffle_f32x4(x[i], x[i + 4], 0xDD);
    const __m512 c = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0x88);
    const __m512 d = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0xDD);
    y[i] = _mm512_shuffle_f32x4(a, c, 0x88), y[i + 8] = _mm512_shuffle_f32x4(a, c, 0xDD);
    y[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
    y[i + 12] = _mm512_shuffle_f32x4(b, d, 0xDD);
  }
  for (int i = 0; i < 16; i++) x[i] = y[i];
}
