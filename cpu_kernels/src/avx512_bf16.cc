// Kernels for AVX512-BF16: dot products of bfloat16 with float32 sums.
#include "kernels.h"
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET                                                                       \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")))

namespace stree {
namespace {

#include "product_body.h"
#include "avx512_lanes.h"

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

#include "lanes.h"
#include "layout.h"
#include "attention_body.h"

}  // namespace

const ProductKernel& avx512_bf16() {
  static constexpr ProductKernel kernel = product_kernel<Bfloat16Dots>();
  return kernel;
}

const AttentionKernel& avx512_bf16_attention() {
  static constexpr AttentionKernel kernel = attention_kernel<Bfloat16Dots>();
  return kernel;
}

}  // namespace stree
#endif
