// Kernels for AVX2 and FMA.
#include "kernels.h"
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma")))

namespace stree {
namespace {

#include "product_body.h"

TARGET inline void store_sums(float* out, const __m256 (&sum)[4], int count) {
  const __m256 ab = _mm256_hadd_ps(sum[0], sum[1]);
  const __m256 cd = _mm256_hadd_ps(sum[2], sum[3]);
  const __m256 parts = _mm256_hadd_ps(ab, cd);
  const __m128 sums =
      _mm_add_ps(_mm256_castps256_ps128(parts), _mm256_extractf128_ps(parts, 1));
  if (count == 4) return _mm_storeu_ps(out, sums);
  float values[4];
  _mm_storeu_ps(values, sums);
  for (int c = 0; c < count; c++) out[c] = values[c];
}

struct Float32 {
  using Weight = float;
  using Row = float;
  using Sum = __m256;
  using Loaded = __m256;
  static constexpr int step = 8, most_rows = 2;
  TARGET static inline float as_row(float x) { return x; }
  TARGET static inline Sum zero() { return _mm256_setzero_ps(); }
  TARGET static inline Loaded weight(const float* w) { return _mm256_loadu_ps(w); }
  TARGET static inline Loaded weight_tail(const float* w, int count) {
    const Tail<float, step> tail(w, count);
    return weight(tail.values);
  }
  TARGET static inline Loaded row(const float* x) { return _mm256_loadu_ps(x); }
  TARGET static inline Sum dot(Sum sum, Loaded w, Loaded x) {
    return _mm256_fmadd_ps(w, x, sum);
  }
  TARGET static inline void store(float* out, const Sum (&sum)[4], int count) {
    store_sums(out, sum, count);
  }
  // Used by the scan.
  TARGET static inline Loaded all(float x) { return _mm256_set1_ps(x); }
  TARGET static inline Loaded times(Loaded a, Loaded b) { return _mm256_mul_ps(a, b); }
  TARGET static inline void put(float* to, Loaded x) { _mm256_storeu_ps(to, x); }
  TARGET static inline void put_tail(float* to, Loaded x, int count) {
    float values[step];
    put(values, x);
    for (int i = 0; i < count; i++) to[i] = values[i];
  }
};

struct Bfloat16 : Float32 {
  using Weight = uint16_t;
  TARGET static inline float as_row(float x) { return widened(bfloat16_of(x)); }
  TARGET static inline Loaded weight(const uint16_t* w) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  TARGET static inline Loaded weight_tail(const uint16_t* w, int count) {
    const Tail<uint16_t, step> tail(w, count);
    return weight(tail.values);
  }
};

typedef int32_t Ints __attribute__((vector_size(32)));

struct Int8 {
  using Weight = int8_t;
  using Row = int16_t;
  using Sum = Ints;
  using Loaded = __m256i;
  using Total = __m256;
  static constexpr int step = 16, most_rows = 2, lanes = 1, offset = 0;
  TARGET static inline Sum begin(const int32_t*) { return Ints{}; }
  TARGET static inline Total zero() { return _mm256_setzero_ps(); }
  TARGET static inline Loaded weight(const int8_t* w) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
  }
  TARGET static inline Loaded weight_tail(const int8_t* w, int count) {
    const Tail<int8_t, step> tail(w, count);
    return weight(tail.values);
  }
  TARGET static inline __m256i row(const int16_t* x) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  }
  TARGET static inline Sum dot(Sum sum, Loaded w, __m256i x) {
    return sum + (Ints)_mm256_madd_epi16(w, x);
  }
  TARGET static inline Total add(Total total, Sum sum, float scale) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps((__m256i)sum), _mm256_set1_ps(scale), total);
  }
  TARGET static inline void store(float* out, const Total (&total)[4], int count) {
    store_sums(out, total, count);
  }
};

#include "int8_body.h"

constexpr ProductKernel int8_products = int8_kernel<Int8>();

#define LEVEL avx2
#include "level_kernels.h"
#endif
