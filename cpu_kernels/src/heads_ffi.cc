// XLA handler that splits the projection of attention into heads, applies the rotary embedding,
// and rounds keys and values to the cache's dtype. Keys and values of padding are 0, because
// masked keys take part in products.
//
// Uses no specific instruction set, as norm_ffi.cc: each number is computed independently.
#include <algorithm>

#include "handler.h"

#define TARGET

namespace ffi = xla::ffi;

namespace stree {
namespace {

#include "bfloat16.h"

inline void put(float* to, float x) { *to = x; }
inline void put(uint16_t* to, float x) { *to = bfloat16_of(x); }

// Rotates the pairs (i, i + half) of one head; other channels are copied.
template <class E>
void rotate(const float* x, const float* cos, const float* sin, int64_t half, int64_t size,
          float multiplier, E* out) {
  for (int64_t i = 0; i < half; i++) {
    const float left = x[i] * multiplier, right = x[half + i] * multiplier;
    put(out + i, left * cos[i] - right * sin[i]);
    put(out + half + i, right * cos[i] + left * sin[i]);
  }
  for (int64_t i = 2 * half; i < size; i++) put(out + i, x[i] * multiplier);
}

struct Heads {
  const float *in, *cos, *sin;  // [rows, width], [rows, half]
  int64_t rows, width, half, size, queries, keys;
  float key_multiplier;
};

template <class E>
void cut_row(const Heads& h, int64_t row, float* q, E* k, E* v) {
  const float* in = h.in + row * h.width;
  const float *cos = h.cos + row * h.half, *sin = h.sin + row * h.half;
  q += row * h.queries * h.size, k += row * h.keys * h.size, v += row * h.keys * h.size;
  for (int64_t i = 0; i < h.queries; i++, in += h.size, q += h.size)
    rotate(in, cos, sin, h.half, h.size, 1.0f, q);
  for (int64_t i = 0; i < h.keys; i++, in += h.size, k += h.size)
    rotate(in, cos, sin, h.half, h.size, h.key_multiplier, k);
  for (int64_t i = 0; i < h.keys * h.size; i++) put(v + i, in[i]);
}

template <class E>
void cut(ffi::ThreadPool& pool, const Heads& h, const ValidRows& valid, float* q, E* k, E* v) {
  const int64_t bytes = 4 * h.rows * h.width;
  const int64_t parts = std::max<int64_t>(1, std::min(h.rows, bytes / (4 * PART_BYTES)));
  share(pool, parts, h.rows, [&](int64_t row) {
    if (valid(row)) return cut_row(h, row, q, k, v);
    const int64_t count = h.keys * h.size;
    std::fill_n(k + row * count, count, E{});
    std::fill_n(v + row * count, count, E{});
  });
}

ffi::Error heads(ffi::ThreadPool pool, F32 in, F32 cos, F32 sin, S32 counts, Out<F32> q,
                 Out<Any> k, Out<Any> v, float key_multiplier, int64_t) {
  const auto shape = in.dimensions(), queries = q->dimensions(), keys = k->dimensions();
  const auto angles = cos.dimensions();
  if (shape.size() != 3 || queries.size() != 4 || keys.size() != 4 || angles.size() != 3)
    return refused("want [B, T, width] and angles [B, T, pairs]");
  const Heads h{in.typed_data(), cos.typed_data(),     sin.typed_data(),
                shape[0] * shape[1], shape[2], angles[2], queries[3],
                queries[2],          keys[2],  key_multiplier};
  if (2 * h.half > h.size || h.width != (h.queries + 2 * h.keys) * h.size)
    return refused("want width = (Hq + 2 Hk) * hd, and pairs of angles that fit in a head");
  const ValidRows valid(counts, h.rows);
  if (!valid.fits()) return refused(NOT_ROWS);
  switch (k->element_type()) {
    case ffi::F32:
      cut(pool, h, valid, q->typed_data(), static_cast<float*>(k->untyped_data()),
          static_cast<float*>(v->untyped_data()));
      return ffi::Error::Success();
    case ffi::BF16:
      cut(pool, h, valid, q->typed_data(), static_cast<uint16_t*>(k->untyped_data()),
          static_cast<uint16_t*>(v->untyped_data()));
      return ffi::Error::Success();
    default:
      return refused("want keys in float32 or bfloat16");
  }
}

}  // namespace
}  // namespace stree

STREE_KERNEL(heads, "key_multiplier")
