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

#include "avx512_dots.h"
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
