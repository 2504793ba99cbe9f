// Products with packed weights, with AVX512-VNNI: a vector has four numbers of each of sixteen
// rows of the weight, so sums need no adding of lanes. A row in 16 bits is 256 h + l, in two
// planes of int8.
#include "panels.h"
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET                                                                       \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")))

namespace stree {
namespace {

#include "panels_avx512.h"

constexpr int FETCH_FROM = 4;
constexpr bool BY_ROW = true;
constexpr int UNROLLED = 8;
template <int P>
constexpr int PLANES = P;
constexpr int SIZES[] = {0, 1, 2, 3, 4, 6, 6, 8, 8, 8, 8, 12, 12, 12, 12, 16, 16};

struct Number {
  __m512i w;
  TARGET explicit inline Number(Bytes w) : w((__m512i)w) {}
};

template <int P>
struct Sum {
  Ints low, high;
};

template <int P>
constexpr int FOUR = 4 * P;

template <int P>
TARGET inline Sum<P> begun(int32_t begin) {
  return {Ints{} + begin, Ints{}};
}
TARGET inline Ints dot(Ints sum, Number number, const char* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, number.w, _mm512_set1_epi32(four));
}
template <int P>
TARGET inline void add_dot(Sum<P>& sum, Number number, const char* x) {
  if constexpr (P == 2) sum.high = dot(sum.high, number, x + 4);
  sum.low = dot(sum.low, number, x);
}
TARGET inline Ints total(const Sum<1>& sum) { return sum.low; }
TARGET inline Ints total(const Sum<2>& sum) { return sum.low + (sum.high << 8); }

// Writes a block of a rounded row, four numbers every `stride` bytes.
template <int P>
TARGET inline void put_block(char* to, int64_t stride, const int16_t* q) {
  int8_t low[32], high[32];
  for (int i = 0; i < 32; i++) {
    high[i] = static_cast<int8_t>((q[i] + 128) >> 8);
    low[i] = static_cast<int8_t>(q[i]);  // q - 256 * high
  }
  for (int v = 0; v < 8; v++, to += stride) {
    __builtin_memcpy(to, low + 4 * v, 4);
    if (P == 2) __builtin_memcpy(to + 4, high + 4 * v, 4);
  }
}

#include "panels_kinds.h"
#include "panels_body.h"

}  // namespace

const PanelProduct* avx512_vnni_panels() { return AllKinds<PanelKernels>::kernels; }

}  // namespace stree
#endif
