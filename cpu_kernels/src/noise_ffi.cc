// XLA handlers for Gumbel noise, and for the largest of many scores.
#include <algorithm>

#include "handler.h"
#include "levels.h"

namespace ffi = xla::ffi;

namespace stree {
namespace {

ffi::Error noise(ffi::ThreadPool pool, U32 keys, S32 numbers, Out<F32> out, int64_t level) {
  const auto shape = keys.dimensions(), folds = numbers.dimensions();
  if (shape.size() != 2 || shape[1] != 2 || folds.size() != 2 || folds[0] != shape[0])
    return refused("want keys [n, 2] and numbers [n, ..]");
  const int64_t size = out->dimensions()[1], cuts = (size + NUMBERS - 1) / NUMBERS;
  const Kernels& kernels = kernels_of(level);
  const int64_t pieces = shape[0] * cuts;
  const int64_t parts = std::max<int64_t>(1, std::min(pieces, shape[0] * size / NUMBERS));
  keep_awake(pool);
  share(pool, parts, pieces, [&](int64_t i) {
    const int64_t row = i / cuts, begin = i % cuts * NUMBERS;
    kernels.noise(keys.typed_data() + 2 * row, numbers.typed_data() + row * folds[1],
                  folds[1], begin, std::min(begin + NUMBERS, size),
                  out->typed_data() + row * size);
  });
  return ffi::Error::Success();
}

// Finds the W largest scores of each row. `scores_of(row)` returns a row of V scores.
template <class ScoresOf>
ffi::Error best_of(ffi::ThreadPool& pool, const F32& scores, Out<F32>& values,
                   Out<S32>& places, Out<F32>& totals, const Kernels& kernels,
                   const ScoresOf& scores_of) {
  const auto shape = scores.dimensions(), result = values->dimensions();
  if (shape.size() == 0 || result.size() != shape.size() || result.back() > shape.back())
    return refused("want scores [.., V] and results [.., W] with W <= V");
  const int64_t V = shape.back(), W = result.back();
  const int64_t rows = static_cast<int64_t>(totals->element_count());
  keep_awake(pool);
  share(pool, row_parts(rows, V), rows, [&](int64_t i) {
    kernels.best(scores_of(i), V, W, values->typed_data() + i * W,
                 places->typed_data() + i * W, totals->typed_data() + i);
  });
  return ffi::Error::Success();
}

ffi::Error best(ffi::ThreadPool pool, F32 scores, Out<F32> values, Out<S32> places,
                Out<F32> totals, int64_t level) {
  const int64_t V = scores.dimensions().size() ? scores.dimensions().back() : 0;
  const auto as_they_are = [&](int64_t row) { return scores.typed_data() + row * V; };
  return best_of(pool, scores, values, places, totals, kernels_of(level), as_they_are);
}

ffi::Error best_drawn(ffi::ThreadPool pool, F32 logits, F32 temperature, F32 noise,
                      Out<F32> values, Out<S32> places, Out<F32> totals, int64_t level) {
  const auto shape = logits.dimensions(), drawn = noise.dimensions();
  const bool fits = shape.size() == 3 && drawn.size() == 2 && drawn[0] == shape[0] &&
                    drawn[1] == shape[2] && temperature.element_count() == shape[0];
  if (!fits)
    return refused("want logits [B, Q, V], temperatures [B] and noise [B, V]");
  const int64_t Q = shape[1], V = shape[2];
  const Kernels& kernels = kernels_of(level);
  const auto made = [&](int64_t row) {
    auto* const buffer = static_cast<float*>(scratch_of_thread<0>(V * sizeof(float)));
    kernels.drawn(logits.typed_data() + row * V, V, temperature.typed_data()[row / Q],
                  noise.typed_data() + row / Q * V, buffer);
    return buffer;
  };
  return best_of(pool, logits, values, places, totals, kernels, made);
}

ffi::Error row_sums(ffi::ThreadPool pool, F32 x, Out<F32> sums, int64_t level) {
  const auto rows = static_cast<int64_t>(sums->element_count());
  const int64_t V = rows ? static_cast<int64_t>(x.element_count()) / rows : 0;
  const Kernels& kernels = kernels_of(level);
  share(pool, row_parts(rows, V), rows, [&](int64_t i) {
    sums->typed_data()[i] = kernels.sum(x.typed_data() + i * V, V);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stree

STREE_KERNEL(noise)
STREE_KERNEL(best)
STREE_KERNEL(best_drawn)
STREE_KERNEL(row_sums)
