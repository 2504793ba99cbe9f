// XLA handlers for products.
#include "levels.h"
#include "product_work.h"

namespace ffi = xla::ffi;

namespace stree {
namespace {

ffi::Error product(ffi::ThreadPool pool, F32 rows, Any weight, S32 counts, Out<F32> out,
                   int64_t level) {
  const auto shape = rows.dimensions(), wide = weight.dimensions();
  if (shape.size() != 2 || wide.size() != 2 || shape[1] != wide[1])
    return refused("want rows [t, k] and a weight [m, k]");
  const Product p{rows.typed_data(), weight.untyped_data(), nullptr, out->typed_data(),
                  shape[0],          shape[1],              wide[0], 1};
  const ValidRows valid(counts, p.t);
  switch (weight.element_type()) {
    case ffi::F32:
      return run_product(pool, float32_product(level, p.m, p.k), p, valid, 4 * p.k);
    case ffi::BF16:
      return run_product(pool, kernels_of(level).bfloat16, p, valid, 2 * p.k);
    default:
      return refused("want a weight in float32 or bfloat16");
  }
}

ffi::Error product_int8(ffi::ThreadPool pool, F32 rows, S8 weight, F32 scale, S32 counts,
                        Out<F32> out, int64_t level) {
  const auto shape = rows.dimensions(), wide = weight.dimensions();
  const auto groups = scale.dimensions();
  if (shape.size() != 2 || wide.size() != 2 || shape[1] != wide[1] ||
      groups.size() != 2 || groups[0] != wide[0] || shape[1] % groups[1] != 0)
    return refused(
        "want rows [t, k], a weight [m, k] and a scale [m, groups]");
  const Product p{rows.typed_data(), weight.typed_data(), scale.typed_data(),
                  out->typed_data(), shape[0],            shape[1],
                  wide[0],           groups[1]};
  return run_product(pool, kernels_of(level).int8, p, ValidRows(counts, p.t), p.k);
}

}  // namespace
}  // namespace stree

STREE_KERNEL(product)
STREE_KERNEL(product_int8)
