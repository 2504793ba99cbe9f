// Kernels for any machine, written with 16-byte vectors of GCC and Clang.
#include "kernels.h"

#define TARGET

namespace stree {
namespace {

#include "product_body.h"

typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef int16_t Shorts __attribute__((vector_size(16)));
typedef int16_t HalfShorts __attribute__((vector_size(8)));
typedef uint16_t Halves __attribute__((vector_size(8)));
typedef uint32_t Words __attribute__((vector_size(16)));
typedef int8_t Bytes __attribute__((vector_size(8)));

template <class V>
inline V loaded(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

inline void store_sums(float* out, const Floats (&sum)[4], int count) {
  for (int c = 0; c < count; c++)
    out[c] = (sum[c][0] + sum[c][1]) + (sum[c][2] + sum[c][3]);
}

struct Float32 {
  using Weight = float;
  using Row = float;
  using Sum = Floats;
  using Loaded = Floats;
  static constexpr int step = 4, most_rows = 2;
  static inline float as_row(float x) { return x; }
  static inline Sum zero() { return Floats{}; }
  static inline Loaded weight(const float* w) { return loaded<Floats>(w); }
  static inline Loaded weight_tail(const float* w, int count) {
    return weight(Tail<float, step>(w, count).values);
  }
  static inline Loaded row(const float* x) { return loaded<Floats>(x); }
  static inline Sum dot(Sum sum, Loaded w, Loaded x) { return sum + w * x; }
  static inline void store(float* out, const Sum (&sum)[4], int count) {
    store_sums(out, sum, count);
  }
  static inline Loaded all(float x) { return Floats{x, x, x, x}; }
  static inline Loaded times(Loaded a, Loaded b) { return a * b; }
  static inline void put(float* to, Loaded x) { __builtin_memcpy(to, &x, sizeof x); }
  static inline void put_tail(float* to, Loaded x, int count) {
    for (int i = 0; i < count; i++) to[i] = x[i];
  }
};

struct Bfloat16 : Float32 {
  using Weight = uint16_t;
  static inline float as_row(float x) { return widened(bfloat16_of(x)); }
  static inline Loaded weight(const uint16_t* w) {
    return (Floats)(__builtin_convertvector(loaded<Halves>(w), Words) << 16);
  }
  static inline Loaded weight_tail(const uint16_t* w, int count) {
    return weight(Tail<uint16_t, step>(w, count).values);
  }
};

struct Int8 {
  using Weight = int8_t;
  using Row = int16_t;
  using Sum = Ints;
  using Loaded = Shorts;
  using Total = Floats;
  static constexpr int step = 8, most_rows = 2;
  static constexpr int lanes = 1, offset = 0;
  static inline Sum begin(const int32_t*) { return Ints{}; }
  static inline Total zero() { return Floats{}; }
  static inline Loaded weight(const int8_t* w) {
    return __builtin_convertvector(loaded<Bytes>(w), Shorts);
  }
  static inline Loaded weight_tail(const int8_t* w, int count) {
    return weight(Tail<int8_t, step>(w, count).values);
  }
  static inline Loaded row(const int16_t* x) { return loaded<Shorts>(x); }
  static inline Sum dot(Sum sum, Loaded w, Loaded x) {
    const Shorts product = w * x;  // at most 128 * 127, which fits in 16 bits
    HalfShorts low, high;
    __builtin_memcpy(&low, &product, 8);
    __builtin_memcpy(&high, reinterpret_cast<const char*>(&product) + 8, 8);
    return sum + __builtin_convertvector(low, Ints) + __builtin_convertvector(high, Ints);
  }
  static inline Total add(Total total, Sum sum, float scale) {
    return total + __builtin_convertvector(sum, Floats) * Float32::all(scale);
  }
  static inline void store(float* out, const Total (&total)[4], int count) {
    store_sums(out, total, count);
  }
};

#include "int8_body.h"

constexpr ProductKernel int8_products = int8_kernel<Int8>();

#define LEVEL portable
#include "level_kernels.h"
