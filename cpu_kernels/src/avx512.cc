// AVX-512 F, BW, DQ and VL.
#include "kernels.h"
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))

namespace stree {
namespace {

#include "product_body.h"
#include "avx512_lanes.h"

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

#include "lanes.h"
#include "scan_body.h"
#include "mixer_body.h"

}  // namespace

const Kernels& avx512() {
  static constexpr Kernels kernels{product_kernel<Float32>(), product_kernel<Bfloat16>(),
                                   ProductKernel{}, scan_kernel<Float32>(),
                                   mixer_kernel<Float32>()};
  return kernels;
}

}  // namespace stree
#endif
