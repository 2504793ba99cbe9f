// XLA handlers that add the tokens accepted in a decoding step to the output.
//
// The reference implementations in JAX are `_cut` and `_recorded` in
// stree_jax/speculation/decoding.py.
//
// Letters: B rows of the batch, M depth of the deepest tree, T nodes of the tree, O capacity
// for output tokens, K trees from which the policy chooses at each step.
#include <algorithm>
#include <limits>

#include "handler.h"

namespace ffi = xla::ffi;

namespace stree {
namespace {

constexpr int32_t RUNNING = 0, STOP_TOKEN = 1, OUT_OF_LENGTH = 2;  // as in decoding.py
constexpr uint8_t FROM_TARGET = 0;                                 // as in draft.py

ffi::Error cut(S32 tokens, S32 accepted, S32 lengths, S32 finish, S32 limits, S32 stops,
               Out<S32> to_length, Out<S32> to_finish) {
  const int64_t B = tokens.dimensions()[0], width = tokens.dimensions()[1];
  const int64_t n = stops.dimensions()[1];
  for (int64_t b = 0; b < B; b++) {
    const int32_t* const stop = stops.typed_data() + b * n;
    const int32_t* const token = tokens.typed_data() + b * width;
    const auto ends = [&](int32_t t) { return std::find(stop, stop + n, t) != stop + n; };
    const auto first = static_cast<int32_t>(std::find_if(token, token + width, ends) - token);
    const int32_t left = limits.typed_data()[b] - lengths.typed_data()[b];
    const int32_t length = std::min({accepted.typed_data()[b], first + 1, left});
    const bool runs = finish.typed_data()[b] == RUNNING;
    int32_t end = length == left ? OUT_OF_LENGTH : RUNNING;
    if (first < length) end = STOP_TOKEN;
    to_length->typed_data()[b] = runs ? length : 0;
    to_finish->typed_data()[b] = runs ? end : finish.typed_data()[b];
  }
  return ffi::Error::Success();
}

ffi::Error record(S32 tokens, U8 origin, S32 root, S32 lengths, S32 used, S32 gained,
                  F32 margin, S32 choice, Bool running, S32 path, S32 counts, S32 new_tokens,
                  F32 margins, U8 origins, Out<S32> to_tokens, Out<U8> to_origin,
                  Out<S32> to_root, Out<S32> to_lengths, Out<S32> to_used,
                  Out<S32> to_gained, Out<F32> to_margin) {
  kept(tokens, to_tokens), kept(origin, to_origin), kept(root, to_root);
  kept(lengths, to_lengths), kept(used, to_used), kept(gained, to_gained);
  kept(margin, to_margin);
  const int64_t B = tokens.dimensions()[0], O = tokens.dimensions()[1];
  const int64_t width = path.dimensions()[1], T = origins.dimensions()[1];
  const int64_t K = used.dimensions()[1], most = gained.dimensions()[1];
  for (int64_t b = 0; b < B; b++) {
    int64_t tree = choice.typed_data()[b];
    if (tree < 0) tree += K;
    const int64_t count = std::min<int64_t>(counts.typed_data()[b], width);
    const int32_t ran = running.typed_data()[b] ? 1 : 0;
    const int64_t before = to_lengths->typed_data()[b];
    for (int64_t j = 0; j < count; j++) {
      const int64_t at = b * width + j;
      float& least = to_margin->typed_data()[b];
      const float found = margins.typed_data()[at];
      // NaN persists, as in jnp.minimum; std::min would drop it.
      if (least == least && !(least <= found)) least = found;
      if (before + j >= O) continue;
      // Path entry 0 is the root, not a draft token.
      const int32_t after = j + 1 < width ? path.typed_data()[at + 1] : 0;
      to_tokens->typed_data()[b * O + before + j] = new_tokens.typed_data()[at];
      to_origin->typed_data()[b * O + before + j] =
          after > 0 ? origins.typed_data()[b * T + std::min<int64_t>(after, T - 1)]
                    : FROM_TARGET;
    }
    if (count > 0) to_root->typed_data()[b] = new_tokens.typed_data()[b * width + count - 1];
    to_lengths->typed_data()[b] += static_cast<int32_t>(counts.typed_data()[b]);
    if (tree >= 0 && tree < K) to_used->typed_data()[b * K + tree] += ran;
    if (count >= 0 && count < most) to_gained->typed_data()[b * most + count] += ran;
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stree

STREE_KERNEL(cut)
STREE_KERNEL(record)
