// XLA handlers that add a level to a growing tree of candidates.
//
// The reference implementation in JAX is `_next_level` in
// stree_jax/speculation/adaptive/best_first.py. All integers are equal to its results. Of equal
// values the first is chosen, as in `lax.top_k`.
//
// Letters: B rows, K taps, C candidates, W nodes of a level.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "trees.h"

namespace ffi = xla::ffi;

namespace stree {
namespace {

// Returns the kind of a node by the drafter's probability, see calibration.py.
int32_t model_kind(float probability, float step, int64_t kinds) {
  const float odds = std::log(probability) - std::log1p(-probability);
  const float place = std::floor((odds + 4.0f) / step);
  if (!(place > 0)) return 0;
  return static_cast<int32_t>(std::min(place, static_cast<float>(kinds - 1)));
}

// The parts of `Grown` in best_first.py that a new level changes.
struct Grown {
  Out<Bool> mask;  // the frontier
  Out<S32> window;
  Out<F32> value;
  Out<U32> path;
  Out<S32> tokens, parents;  // the candidates
  Out<F32> values;
  Out<S32> kinds;
  Out<U32> paths;
  Out<Bool> node_mask;  // their nodes
  Out<S32> node_depth, node_window;
};

// Adds level d below the frontier.
ffi::Error add_level(const F32& best, const S32& guess, const F32& total, int64_t d, const F32&
                     probability, Grown& grown, int64_t prime, float step, int64_t model_kinds)
                     {
  const int64_t B = grown.mask->dimensions()[0], W = grown.mask->dimensions()[1];
  const int64_t C = grown.mask->dimensions()[2], K = grown.window->dimensions()[2];
  const int64_t Q = best.dimensions()[1], nodes = grown.node_depth->dimensions()[1];
  constexpr int64_t MAX_WIDTH = 64;
  if (W > MAX_WIDTH || best.dimensions()[2] != W || (Q != 1 && Q != W))
    return refused("want at most 64 guesses per node, and as many as nodes of a level");
  if (d < 0 || (d + 1) * W > C) return refused("want capacity for another level");
  uint32_t power = 1;
  for (int64_t i = 0; i < d; i++) power *= static_cast<uint32_t>(prime);
  const int64_t first = d * W;  // of the level, among the candidates
  auto* const old_mask = static_cast<bool*>(scratch_of_thread<1>(W * C));
  auto* const old_window = static_cast<int32_t*>(scratch_of_thread<2>(4 * W * K));
  for (int64_t b = 0; b < B; b++) {
    float worth[MAX_WIDTH * MAX_WIDTH], old_value[MAX_WIDTH];
    uint32_t old_path[MAX_WIDTH];
    int32_t kind[MAX_WIDTH * MAX_WIDTH], chosen[MAX_WIDTH];
    std::copy_n(grown.value->typed_data() + b * W, W, old_value);
    std::copy_n(grown.path->typed_data() + b * W, W, old_path);
    std::copy_n(grown.mask->typed_data() + b * W * C, W * C, old_mask);
    std::copy_n(grown.window->typed_data() + b * W * K, W * K, old_window);
    const auto query = [&](int64_t w) { return b * Q + (Q == 1 ? 0 : w); };
    for (int64_t w = 0; w < W; w++)
      for (int64_t j = 0; j < W; j++) {
        const float below = best.typed_data()[query(w) * W + j] - total.typed_data()[query(w)];
        const int32_t z = model_kind(std::exp(below), step, model_kinds);
        kind[w * W + j] = z;
        worth[w * W + j] = old_value[w] * probability.typed_data()[z];
      }
    best_places(worth, W * W, W, chosen);
    for (int64_t n = 0; n < W; n++) {
      const int64_t w = chosen[n] / W, c = first + n, at = b * W + n;
      const int32_t token = guess.typed_data()[query(w) * W + chosen[n] % W];
      const uint32_t number = old_path[w] + (static_cast<uint32_t>(token) + 1) * power;
      const float v = worth[chosen[n]];
      grown.value->typed_data()[at] = v;
      grown.path->typed_data()[at] = number;
      bool* const m = grown.mask->typed_data() + at * C;
      std::copy_n(old_mask + w * C, C, m);
      m[c] = true;
      int32_t* const taps = grown.window->typed_data() + at * K;
      std::copy_n(old_window + w * K + 1, K - 1, taps);
      taps[K - 1] = static_cast<int32_t>(c + K - 1);
      grown.tokens->typed_data()[b * C + c] = token;
      grown.parents->typed_data()[b * C + c] = static_cast<int32_t>(d ? first - W + w + 1 : 0);
      grown.values->typed_data()[b * C + c] = v;
      grown.kinds->typed_data()[b * C + c] = kind[chosen[n]];
      grown.paths->typed_data()[b * C + c] = number;
      bool* const row = grown.node_mask->typed_data() + (b * nodes + c) * nodes;
      std::copy_n(m, C, row);
      std::fill(row + C, row + nodes, false);
      grown.node_depth->typed_data()[b * nodes + c] = static_cast<int32_t>(d);
      std::copy_n(taps, K, grown.node_window->typed_data() + (b * nodes + c) * K);
    }
  }
  return ffi::Error::Success();
}

// Adds the next level, in place.
ffi::Error next_level(F32 best, S32 guess, F32 total, F32 probability, S32 level, Bool mask,
                      S32 window, F32 value, U32 path, S32 tokens, S32 parents, F32 values,
                      S32 kinds, U32 paths, Bool node_mask, S32 node_depth, S32 node_window,
                      Out<Bool> to_mask, Out<S32> to_window, Out<F32> to_value,
                      Out<U32> to_path, Out<S32> to_tokens, Out<S32> to_parents,
                      Out<F32> to_values, Out<S32> to_kinds, Out<U32> to_paths,
                      Out<Bool> to_node_mask, Out<S32> to_node_depth,
                      Out<S32> to_node_window, int64_t prime, float step,
                      int64_t model_kinds) {
  kept(mask, to_mask), kept(window, to_window), kept(value, to_value), kept(path, to_path);
  kept(tokens, to_tokens), kept(parents, to_parents), kept(values, to_values);
  kept(kinds, to_kinds), kept(paths, to_paths), kept(node_mask, to_node_mask);
  kept(node_depth, to_node_depth), kept(node_window, to_node_window);
  Grown grown{to_mask,   to_window,  to_value, to_path,  to_tokens,    to_parents,
              to_values, to_kinds,   to_paths, to_node_mask, to_node_depth, to_node_window};
  return add_level(best, guess, total, level.typed_data()[0], probability, grown, prime, step,
                   model_kinds);
}

// Adds the first level, below the root.
ffi::Error first_level(F32 best, S32 guess, F32 total, F32 probability, Out<Bool> mask,
                       Out<S32> window, Out<F32> value, Out<U32> path, Out<S32> tokens,
                       Out<S32> parents, Out<F32> values, Out<S32> kinds, Out<U32> paths,
                       Out<Bool> node_mask, Out<S32> node_depth, Out<S32> node_window,
                       int64_t prime, float step, int64_t model_kinds) {
  const auto clear = [](auto& z) { std::memset(z->untyped_data(), 0, z->size_bytes()); };
  clear(mask), clear(window), clear(value), clear(path), clear(tokens), clear(parents);
  clear(values), clear(kinds), clear(paths), clear(node_mask), clear(node_depth);
  clear(node_window);
  const int64_t K = window->dimensions()[2], W = mask->dimensions()[1];
  for (int64_t b = 0; b < mask->dimensions()[0]; b++) {
    value->typed_data()[b * W] = 1;
    for (int64_t i = 0; i < W * K; i++)  // the last tokens of the text
      window->typed_data()[b * W * K + i] = static_cast<int32_t>(i % K) - 1;
  }
  Grown grown{mask,   window, value, path,      tokens,     parents,
              values, kinds,  paths, node_mask, node_depth, node_window};
  return add_level(best, guess, total, 0, probability, grown, prime, step, model_kinds);
}

}  // namespace
}  // namespace stree

STREE_KERNEL(next_level, "prime", "step", "model_kinds")
STREE_KERNEL(first_level, "prime", "step", "model_kinds")
