// XLA handler for the gated activation of an MLP.
#include "handler.h"
#include "levels.h"

namespace ffi = xla::ffi;

namespace stree {
namespace {

ffi::Error gate(ffi::ThreadPool pool, F32 in, S32 counts, Out<F32> out, float multiplier,
                int64_t level) {
  const auto shape = in.dimensions(), half = out->dimensions();
  if (shape.size() == 0 || half.size() == 0 || shape.back() != 2 * half.back())
    return refused("want rows [.., 2 f] and a result [.., f]");
  const int64_t size = half.back();
  if (size == 0) return ffi::Error::Success();
  const int64_t rows = static_cast<int64_t>(out->element_count()) / size;
  const ValidRows valid(counts, rows);
  if (!valid.fits()) return refused(NOT_ROWS);
  const Kernels& kernels = kernels_of(level);
  const int64_t parts = std::max<int64_t>(1, std::min(rows, rows * size * 2 / PART_BYTES));
  share(pool, parts, rows, [&](int64_t i) {
    const float* const row = in.typed_data() + i * 2 * size;
    if (valid(i)) kernels.gate(row, size, multiplier, out->typed_data() + i * size);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stree

STREE_KERNEL(gate, "multiplier")
