// Kernels for AVX-512 F, BW, DQ and VL.
#include "kernels.h"
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))

namespace stree {
namespace {

#include "product_body.h"
#include "avx512_lanes.h"

constexpr ProductKernel int8_products{};

#define LEVEL avx512
#include "level_kernels.h"
#endif
