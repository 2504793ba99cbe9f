// XLA handler for the RMSNorm with a scale.
//
// Uses no specific instruction set, because a row is small and in the cache. A row always has
// sixteen partial sums, which the compiler vectorizes, so results are bitwise equal on every
// machine.
#include "handler.h"

#define TARGET

namespace ffi = xla::ffi;

namespace stree {
namespace {

#include "bfloat16.h"

constexpr int SUMS = 16;

inline float widened(float value) { return value; }

template <class E>
void norm_row(const float* __restrict__ x, const E* __restrict__ scale,
              float* __restrict__ out, int64_t d, float eps) {
  float sums[SUMS] = {};
  int64_t i = 0;
  for (; i + SUMS <= d; i += SUMS)
    for (int j = 0; j < SUMS; j++) sums[j] += x[i + j] * x[i + j];
  for (int j = 0; i + j < d; j++) sums[j] += x[i + j] * x[i + j];
  for (int half = SUMS / 2; half > 0; half /= 2)
    for (int j = 0; j < half; j++) sums[j] += sums[j + half];
  const float factor = 1.0f / __builtin_sqrtf(sums[0] / static_cast<float>(d) + eps);
  for (i = 0; i < d; i++) out[i] = x[i] * factor * widened(scale[i]);
}

template <class E>
void norm_rows(ffi::ThreadPool& pool, const F32& x, const void* scale,
               const ValidRows& valid, float* out, int64_t rows, int64_t d, float eps) {
  const int64_t parts = std::max<int64_t>(1, std::min(rows, rows * d / PART_BYTES));
  share(pool, parts, rows, [&](int64_t i) {
    const float* const row = x.typed_data() + i * d;
    if (valid(i)) norm_row(row, static_cast<const E*>(scale), out + i * d, d, eps);
  });
}

ffi::Error norm(ffi::ThreadPool pool, F32 x, Any scale, S32 counts, Out<F32> out, float eps,
                int64_t) {
  const auto shape = x.dimensions();
  const auto d = static_cast<int64_t>(scale.element_count());
  if (d == 0 || shape.size() == 0 || shape[shape.size() - 1] != d)
    return refused("want rows [.., d] and a scale [d]");
  const int64_t rows = static_cast<int64_t>(x.element_count()) / d;
  const ValidRows valid(counts, rows);
  if (!valid.fits()) return refused(NOT_ROWS);
  float* const to = out->typed_data();
  switch (scale.element_type()) {
    case ffi::F32:
      norm_rows<float>(pool, x, scale.untyped_data(), valid, to, rows, d, eps);
      break;
    case ffi::BF16:
      norm_rows<uint16_t>(pool, x, scale.untyped_data(), valid, to, rows, d, eps);
      break;
    default:
      return refused("want a scale in float32 or bfloat16");
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stree

STREE_KERNEL(norm, "eps")
