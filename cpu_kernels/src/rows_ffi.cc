// XLA handler for the lookup of rows in a table, such as an embedding.
//
// Uses no specific instruction set: it copies rows, or widens their numbers.
#include <algorithm>

#include "handler.h"

#define TARGET

namespace ffi = xla::ffi;

namespace stree {
namespace {

#include "bfloat16.h"

inline float widened(float value) { return value; }

template <class E>
void copy_row(const E* from, int64_t size, float* to) {
  for (int64_t i = 0; i < size; i++) to[i] = widened(from[i]);
}

// Looks up the rows. As in JAX, negative ids count from the end, and ids out of range are clamped.
ffi::Error copied(Any& table, S32& ids, Out<F32>& out) {
  const auto shape = table.dimensions();
  if (shape.size() != 2 || shape[0] < 1 ||
      static_cast<int64_t>(out->element_count()) !=
          static_cast<int64_t>(ids.element_count()) * shape[1])
    return refused("want a table [V, d], ids [..] and results [.., d]");
  const int64_t V = shape[0], d = shape[1];
  const auto copy = [&](const auto* numbers) {
    for (int64_t i = 0; i < static_cast<int64_t>(ids.element_count()); i++) {
      const int64_t id = ids.typed_data()[i], from = id < 0 ? id + V : id;
      const int64_t row = std::clamp<int64_t>(from, 0, V - 1);
      copy_row(numbers + row * d, d, out->typed_data() + i * d);
    }
    return ffi::Error::Success();
  };
  switch (table.element_type()) {
    case ffi::F32:
      return copy(static_cast<const float*>(table.untyped_data()));
    case ffi::BF16:
      return copy(static_cast<const uint16_t*>(table.untyped_data()));
    default:
      return refused("want a table in float32 or bfloat16");
  }
}

// Every forward pass begins with this kernel, so it also moves the program to a pool thread.
ffi::Future rows(ffi::ThreadPool pool, Any table, S32 ids, Out<F32> out, int64_t) {
  return going_on_in(pool, copied(table, ids, out));
}

}  // namespace
}  // namespace stree

STREE_KERNEL(rows)
