// XLA handlers for greedy acceptance of a path in a tree, and for argmax.
//
// The reference implementations in JAX are `accept_greedy` in stree_jax/speculation/accept.py and
// models/base/argmax.py. Results are bitwise equal to theirs.
//
// Letters: B rows, T nodes, M depth, V tokens.
#include <algorithm>
#include <limits>

#include "handler.h"

namespace ffi = xla::ffi;

namespace stree {
namespace {

struct Top {
  int32_t place;
  float lead;  // difference to the second largest
};

// Returns the largest of `size` numbers: the first of equal ones, or the first NaN.
Top top_of(const float* z, int64_t size) {
  constexpr int64_t LANES = 16;
  constexpr float LOWEST = -std::numeric_limits<float>::infinity();
  float first[LANES], second[LANES];
  std::fill_n(first, LANES, LOWEST), std::fill_n(second, LANES, LOWEST);
  int32_t has_nan = 0;
  const auto see = [&](float x, int64_t lane) {
    const float less = x < first[lane] ? x : first[lane];
    second[lane] = less > second[lane] ? less : second[lane];
    first[lane] = x > first[lane] ? x : first[lane];
    has_nan |= x != x;
  };
  const int64_t whole = size / LANES * LANES;
  for (int64_t i = 0; i < whole; i += LANES)
    for (int64_t lane = 0; lane < LANES; lane++) see(z[i + lane], lane);
  for (int64_t i = whole; i < size; i++) see(z[i], 0);
  if (has_nan) {
    const auto nan = std::find_if(z, z + size, [](float x) { return x != x; });
    return {static_cast<int32_t>(nan - z), *nan};
  }
  const auto best = std::max_element(first, first + LANES);
  float next = *std::max_element(second, second + LANES);
  for (const float* lane = first; lane < first + LANES; lane++)
    if (lane != best) next = std::max(next, *lane);
  return {static_cast<int32_t>(std::find(z, z + size, *best) - z), *best - next};
}

// Finds the longest path of most probable tokens, see accept.py. Computes the argmax only
// for nodes on the path and for nodes that could have continued it.
ffi::Error accept_greedy(F32 scores, S32 tokens, S32 parents, S32 depth, S32 paths,
                         Out<S32> to_path, Out<S32> to_length, Out<S32> to_tokens,
                         Out<F32> to_margin, int64_t vocabulary) {
  const auto shape = scores.dimensions();
  const int64_t B = shape[0], T = shape[1], V = shape[2], longest = paths.dimensions()[2];
  if (vocabulary < 1 || vocabulary > V)
    return refused("want scores of all tokens");
  auto* const top = static_cast<Top*>(scratch_of_thread<0>(T * sizeof(Top)));
  auto* const right = static_cast<bool*>(scratch_of_thread<1>(T));
  for (int64_t b = 0; b < B; b++) {
    const auto of = [&](const S32& table) { return table.typed_data() + b * T; };
    const int32_t* const up = of(parents);
    const auto look = [&](int64_t t) -> const Top& {
      if (top[t].place < 0)
        top[t] = top_of(scores.typed_data() + (b * T + t) * V, vocabulary);
      return top[t];
    };
    int64_t last = 0;
    int32_t deepest = -1;
    for (int64_t t = 0; t < T; t++) {
      const int32_t parent = up[t];
      top[t].place = -1;
      right[t] = parent == -1;
      if (parent >= 0 && parent < t)
        right[t] = right[parent] && look(parent).place == of(tokens)[t];
      if (!right[t] || of(depth)[t] <= deepest) continue;
      last = t, deepest = of(depth)[t];
    }
    to_length->typed_data()[b] = deepest + 1;
    for (int64_t j = 0; j < longest; j++) {
      const int32_t node = paths.typed_data()[(b * T + last) * longest + j];
      const Top& chosen = look(node);
      to_path->typed_data()[b * longest + j] = node;
      to_tokens->typed_data()[b * longest + j] = chosen.place;
      to_margin->typed_data()[b * longest + j] = chosen.lead;
    }
  }
  return ffi::Error::Success();
}

ffi::Error argmax(ffi::ThreadPool pool, F32 numbers, Out<S32> places, int64_t) {
  const auto shape = numbers.dimensions();
  const auto rows = static_cast<int64_t>(places->element_count());
  if (shape.size() == 0 || rows * shape.back() != static_cast<int64_t>(numbers.element_count()))
    return refused("want numbers [.., n] and places [..]");
  const int64_t n = shape.back();
  share(pool, row_parts(rows, n), rows, [&](int64_t i) {
    places->typed_data()[i] = top_of(numbers.typed_data() + i * n, n).place;
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stree

STREE_KERNEL(argmax)
STREE_KERNEL(accept_greedy, "vocabulary")
