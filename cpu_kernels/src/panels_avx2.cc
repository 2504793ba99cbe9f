// Products with packed weights, with AVX2, FMA and F16C: rows are int16, and a vector of numbers
// becomes two vectors of int16.
#include "panels.h"
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))

namespace stree {
namespace {

constexpr int W = 8, FETCH_FROM = 17, UNROLLED = 8;
constexpr bool BY_ROW = false;
constexpr int SIZES[] = {0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4};
template <int P>
constexpr int PLANES = 2;

typedef uint16_t Bytes __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef float Floats __attribute__((vector_size(32)));

TARGET inline Floats halves(const void* from) {
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
TARGET inline __m128i eight(const void* from) {
  return _mm_loadl_epi64(static_cast<const __m128i*>(from));
}
TARGET inline Floats unsigned_bytes(const void* from) {
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight(from)));
}
TARGET inline Floats signed_bytes(const void* from) {
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight(from)));
}
TARGET inline Bytes looked_up(const uint8_t (&table)[16], Bytes places) {
  const __m128i one = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  return (Bytes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(one), (__m256i)places);
}
TARGET inline Floats fused(Floats a, Floats b, Floats c) {
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

// Numbers 0 and 2 of every row of the weight, and numbers 1 and 3.
struct Number {
  __m256i even, odd;
  TARGET explicit inline Number(Bytes w) : even((__m256i)(w & 0xFF)), odd((__m256i)(w >> 8)) {}
};

template <int P>
struct Sum {
  Ints all;
};

template <int P>
constexpr int FOUR = 8;

template <int P>
TARGET inline Sum<P> begun(int32_t begin) {
  return {Ints{} + begin};
}
TARGET inline Ints dot(__m256i numbers, const char* x) {
  int32_t two;
  __builtin_memcpy(&two, x, 4);
  return (Ints)_mm256_madd_epi16(numbers, _mm256_set1_epi32(two));
}
template <int P>
TARGET inline void add_dot(Sum<P>& sum, const Number& number, const char* x) {
  sum.all += dot(number.even, x) + dot(number.odd, x + 4);
}
template <int P>
TARGET inline Ints total(const Sum<P>& sum) {
  return sum.all;
}

// Writes a block of a rounded row, four numbers every `stride` bytes.
template <int P>
TARGET inline void put_block(char* to, int64_t stride, const int16_t* q) {
  for (int v = 0; v < 8; v++, q += 4) {
    const int16_t four[] = {q[0], q[2], q[1], q[3]};
    __builtin_memcpy(to + v * stride, four, sizeof four);
  }
}

#include "panels_kinds.h"
#include "panels_body.h"

}  // namespace

const PanelProduct* avx2_panels() { return AllKinds<PanelKernels>::kernels; }

}  // namespace stree
#endif
