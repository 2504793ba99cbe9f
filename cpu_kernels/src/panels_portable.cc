// Products with packed weights, and rows of packed tables, for any machine.
#include "panels.h"

#define TARGET

namespace stree {
namespace {

constexpr int W = 4, FETCH_FROM = 17;
constexpr bool BY_ROW = false;
constexpr int UNROLLED = 1;
template <int P>
constexpr int PLANES = 2;
constexpr int SIZES[] = {0, 1, 2, 2, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4};

typedef uint16_t Bytes __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
typedef float Floats __attribute__((vector_size(16)));

// Converts float16. Subnormal ones, too: the flags that flush float32's have no effect here.
inline Floats halves(const void* from) {
  uint16_t halves[W];
  __builtin_memcpy(halves, from, sizeof halves);
  Words bits;
  for (int i = 0; i < W; i++) bits[i] = halves[i];
  const Words size = bits & 0x7FFF, sign = (bits & 0x8000) << 16;
  const Words small = (Words)(__builtin_convertvector((Ints)size, Floats) * 0x1p-24f);
  const Words normal = (size << 13) + ((size >= 0x7C00 ? Words{} + 224 : Words{} + 112) << 23);
  return (Floats)((size < 0x400 ? small : normal) | sign);
}
inline Floats unsigned_bytes(const void* from) {
  const auto* bytes = static_cast<const uint8_t*>(from);
  Floats numbers;
  for (int i = 0; i < W; i++) numbers[i] = bytes[i];
  return numbers;
}
inline Floats signed_bytes(const void* from) {
  const auto* bytes = static_cast<const int8_t*>(from);
  Floats numbers;
  for (int i = 0; i < W; i++) numbers[i] = bytes[i];
  return numbers;
}
inline Bytes looked_up(const uint8_t (&table)[16], Bytes places) {
  uint8_t bytes[4 * W];
  __builtin_memcpy(bytes, &places, sizeof bytes);
  for (uint8_t& byte : bytes) byte = table[byte];
  __builtin_memcpy(&places, bytes, sizeof bytes);
  return places;
}
inline Floats fused(Floats a, Floats b, Floats c) {
  for (int i = 0; i < W; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}

struct Number {
  Ints of[4];
  explicit inline Number(Bytes w) {
    const Words words = (Words)w;
    for (int i = 0; i < 4; i++) of[i] = (Ints)((words >> (8 * i)) & 0xFF);
  }
};

template <int P>
struct Sum {
  Ints all;
};

template <int P>
constexpr int FOUR = 8;

template <int P>
inline Sum<P> begun(int32_t begin) {
  return {Ints{} + begin};
}
template <int P>
inline void add_dot(Sum<P>& sum, const Number& number, const char* x) {
  int16_t four[4];
  __builtin_memcpy(four, x, sizeof four);
  for (int i = 0; i < 4; i++) sum.all += number.of[i] * static_cast<int32_t>(four[i]);
}
template <int P>
inline Ints total(const Sum<P>& sum) {
  return sum.all;
}

template <int P>
inline void put_block(char* to, int64_t stride, const int16_t* q) {
  for (int v = 0; v < 8; v++) __builtin_memcpy(to + v * stride, q + 4 * v, 8);
}

#include "panels_kinds.h"
#include "panels_body.h"

// Writes one row of a panel.
template <class K>
void decode(const uint8_t* panel, int lane, int64_t k, float* out) {
  const int first = lane / W * W;
  for (int64_t t = 0; t < k / (K::blocks * BLOCK); t++, panel += K::bytes) {
    const typename K::Scales scales(panel, first);
    for (int b = 0; b < K::blocks; b++, out += BLOCK) {
      Bytes w[8];
      unpack<K>(w, panel + K::numbers + b * K::block_bytes + 4 * first, vector_at<Bytes>);
      for (int v = 0; v < 8; v++) {
        const int i = b * (32 / K::span) + 4 * v / K::span;
        uint8_t numbers[4];
        __builtin_memcpy(numbers, reinterpret_cast<const char*>(w + v) + 4 * (lane - first), 4);
        const float scale = scales.scale(i)[lane - first];
        float min = 0.0f;
        if constexpr (K::mins) min = scales.min(i)[lane - first];
        for (int j = 0; j < 4; j++)
          out[4 * v + j] = scale * static_cast<float>(numbers[j] - K::zero) + min;
      }
    }
  }
}

template <class... Ks>
struct Kinds {
  static constexpr decltype(&decode<Q4_0Kind>) decoders[] = {decode<Ks>...};
};

}  // namespace

const PanelProduct* portable_panels() { return AllKinds<PanelKernels>::kernels; }

void decode_panel_row(int64_t kind, const uint8_t* data, int64_t row, int64_t k, float* out) {
  const PanelKind& of = PANEL_KIND[kind];
  const uint8_t* const panel = data + row / PANEL * (k / of.tile * of.bytes);
  AllKinds<Kinds>::decoders[kind](panel, static_cast<int>(row % PANEL), k, out);
}

}  // namespace stree
