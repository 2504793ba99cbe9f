// AVX512-VNNI: dot products of bytes, unsigned by signed, added up in int32.
#include "kernels.h"
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET                                                                       \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")))

namespace stree {
namespace {

#include "product_body.h"
#include "avx512_lanes.h"

// With __m512i, which is eight int64 to it, GCC 12 keeps every sum twice.
typedef int32_t Ints __attribute__((vector_size(64)));

struct Int8 {
  using Weight = int8_t;
  using Row = int8_t;
  using Sum = Ints;
  using Loaded = __m512i;
  using Total = __m512;
  static constexpr int step = 64, most_rows = 6;
  static constexpr int lanes = 16, offset = 128;  // added to weights: then unsigned
  TARGET static inline Sum begin(const int32_t* lane) {
    return (Ints)_mm512_loadu_si512(lane);
  }
  TARGET static inline Total zero() { return _mm512_setzero_ps(); }
  TARGET static inline Loaded shifted(__m512i w) {
    return _mm512_xor_si512(w, _mm512_set1_epi8(-128));
  }
  TARGET static inline Loaded weight(const int8_t* w) {
    return shifted(_mm512_loadu_si512(w));
  }
  TARGET static inline Loaded weight_tail(const int8_t* w, int count) {
    return shifted(_mm512_maskz_loadu_epi8((1ull << count) - 1, w));
  }
  TARGET static inline __m512i row(const int8_t* x) { return _mm512_loadu_si512(x); }
  TARGET static inline Sum dot(Sum sum, Loaded w, __m512i x) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, w, x);
  }
  TARGET static inline Total add(Total total, Sum sum, float scale) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps((__m512i)sum), _mm512_set1_ps(scale), total);
  }
  TARGET static inline void store(float* out, const Total (&total)[4], int count) {
    store_sums(out, total, count);
  }
};

#include "int8_body.h"

}  // namespace

const ProductKernel& avx512_vnni() {
  static constexpr ProductKernel kernel = int8_kernel<Int8>();
  return kernel;
}

}  // namespace stree
#endif
