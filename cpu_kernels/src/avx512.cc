// AVX-512 F, BW, DQ and VL.
#include "kernels.h"
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))

namespace stree {
namespace {

#include "product_body.h"
#include "avx512_lanes.h"

#include "lanes.h"
#include "layout.h"
#include "scan_body.h"
#include "mixer_body.h"
#include "attention_body.h"
#include "gate_body.h"
#include "noise_body.h"

}  // namespace

const Kernels& avx512() {
  static constexpr Kernels kernels{product_kernel<Float32>(), product_kernel<Bfloat16>(),
                                   ProductKernel{}, scan_kernel<Float32>(),
                                   mixer_kernel<Float32>(),
                                   attention_kernel<Float32>(),
                                   attention_kernel<Bfloat16>(), gate_row,
                                   noise_row, best_row, drawn_row};
  return kernels;
}

}  // namespace stree
#endif
