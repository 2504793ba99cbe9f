// XLA handlers for the bookkeeping of trees. Each replaces dozens of small XLA operations.
//
// The reference implementations in JAX are in models/layers/nodes.py, and in layout.py, lookup.py and
// pool.py of stree_jax/speculation. All integers are equal to theirs. Of equal values the first is
// chosen, as in `lax.top_k` and `argmax`.
//
// Letters: B rows, T nodes, K taps, M depth, C candidates, W nodes of a level.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "trees.h"

namespace ffi = xla::ffi;

namespace stree {
namespace {

constexpr int32_t NO_NODE = -2;  // parent of a padding row, see models/layers/nodes.py

// Returns the parent of a node, or a negative number for a root, padding or an invalid table.
inline int32_t above(const int32_t* parents, int64_t T, int32_t node) {
  const int32_t parent = parents[node];
  return parent < T ? parent : -1;
}

// Computes mask [B, T, T], depth [B, T] and window [B, T, K] from parents [B, T].
ffi::Error tree_nodes(S32 parents, Out<Bool> mask, Out<S32> depth, Out<S32> window) {
  const int64_t B = parents.dimensions()[0], T = parents.dimensions()[1];
  const int64_t K = window->dimensions()[2];
  bool* const is_above = mask->typed_data();
  std::memset(is_above, 0, B * T * T);
  for (int64_t b = 0; b < B; b++) {
    const int32_t* const up = parents.typed_data() + b * T;
    for (int64_t t = 0; t < T; t++) {
      const int64_t row = b * T + t;
      int32_t* const taps = window->typed_data() + row * K;
      int32_t node = up[t] == NO_NODE ? NO_NODE : static_cast<int32_t>(t), count = 0;
      for (; node >= 0 && count < T; count++, node = above(up, T, node)) {
        is_above[row * T + node] = true;
        if (count < K) taps[K - 1 - count] = static_cast<int32_t>(K - 1 + node);
      }
      const int32_t deep = std::max(count - 1, 0);
      depth->typed_data()[row] = deep;
      for (int64_t back = count; back < K; back++)  // committed tokens
        taps[K - 1 - back] = static_cast<int32_t>(K - 1 - (back - deep));
    }
  }
  return ffi::Error::Success();
}

// Computes depth [B, T], paths [B, T, M + 1] and children [B, T, most] from parents [B, T].
ffi::Error tree_layout(S32 parents, Out<S32> depth, Out<S32> paths, Out<S32> children) {
  const int64_t B = parents.dimensions()[0], T = parents.dimensions()[1];
  const int64_t longest = paths->dimensions()[2], most = children->dimensions()[2];
  int32_t* const child = children->typed_data();
  std::memset(paths->typed_data(), 0, paths->size_bytes());
  std::fill(child, child + B * T * most, static_cast<int32_t>(T));
  for (int64_t b = 0; b < B; b++) {
    const int32_t* const up = parents.typed_data() + b * T;
    for (int64_t t = 0; t < T; t++) {
      const int64_t row = b * T + t;
      int32_t* const path = paths->typed_data() + row * longest;
      int64_t count = 0;
      int32_t node = static_cast<int32_t>(t);
      for (; node >= 0 && count < longest; count++, node = above(up, T, node))
        path[count] = node;
      std::reverse(path, path + count);
      depth->typed_data()[row] = static_cast<int32_t>(count - 1);
      const int32_t parent = above(up, T, static_cast<int32_t>(t));
      if (parent < 0) continue;
      int32_t* const slots = child + (b * T + parent) * most;
      int32_t* const slot = std::find(slots, slots + most, static_cast<int32_t>(T));
      if (slot != slots + most) *slot = static_cast<int32_t>(t);
    }
  }
  return ffi::Error::Success();
}

struct Place {
  int32_t at, matched;
};

constexpr int32_t SEPARATOR = -1;  // between earlier texts, see drafters/earlier.py

constexpr int64_t BLOCK = 32;  // tokens

// True if a block has the token. Compilers vectorize the loop.
bool has(const int32_t* tokens, int32_t token) {
  int32_t found = 0;
  for (int64_t i = 0; i < BLOCK; i++) found |= tokens[i] == token;
  return found;
}

// Finds the places of a text whose preceding tokens match the last tokens of the text, with the
// number of matching tokens, at most `longest`.
void find_matches(const int32_t* text, int64_t length, int64_t longest, Place* found,
                  int64_t* count) {
  *count = 0;
  if (length < 1) return;
  const int32_t last = text[length - 1];
  for (int64_t start = 0; start < length - 1; start += BLOCK) {
    const int64_t end = std::min(start + BLOCK, length - 1);
    if (end - start == BLOCK && !has(text + start, last)) continue;
    for (int64_t i = start; i < end; i++) {
      if (text[i] != last || text[i + 1] == SEPARATOR) continue;
      int64_t j = 1;
      while (j < longest && j <= i && text[i - j] == text[length - 1 - j] &&
             text[i - j] != SEPARATOR)
        j++;
      found[(*count)++] = {static_cast<int32_t>(i), static_cast<int32_t>(j)};
    }
  }
}

// Looks up candidates [B, W * M] that continue texts [B, S] (prompt lookup), see pool.py.
ffi::Error look_up(S32 tokens, S32 length, F32 probability, Out<S32> token, Out<S32> parent,
                   Out<F32> value, Out<S32> kind, Out<U32> path, int64_t earlier, int64_t W,
                   int64_t M, int64_t longest, int64_t longest_match, int64_t prime,
                   int64_t first_kind) {
  const int64_t B = tokens.dimensions()[0], S = tokens.dimensions()[1];
  const int64_t C = token->dimensions()[1];
  constexpr int64_t MOST = 8;
  if (W < 1 || W > MOST || M < 0 || C < W * M || S < 1)
    return refused("want capacity for W * M candidates");
  for (int64_t b = 0; b < B; b++) {
    const int32_t* const text = tokens.typed_data() + b * S;
    const int64_t count = std::min<int64_t>(length.typed_data()[b], S);
    auto* const found = static_cast<Place*>(scratch_of_thread<0>(S * sizeof(Place)));
    int64_t matches = 0;
    find_matches(text, count, longest_match, found, &matches);
    Place chosen[MOST];
    for (int64_t w = 0; w < W; w++) {
      // Choose the longest match, the latest of equal ones. The second match must continue with
      // another token than the first.
      Place* best = nullptr;
      for (Place* here = found; here < found + matches; here++) {
        if (here->matched == 0) continue;  // already chosen
        if (w == 1 && chosen[0].matched > 0 &&
            text[here->at + 1] == text[chosen[0].at + 1])
          continue;
        if (best == nullptr || here->matched >= best->matched) best = here;
      }
      chosen[w] = best ? *best : Place{static_cast<int32_t>(S - 1), 0};
      if (best) best->matched = 0;
    }
    uint32_t numbers[MOST];
    const int64_t base = b * C;
    int32_t* const t = token->typed_data() + base;
    int32_t* const up = parent->typed_data() + base;
    int32_t* const z = kind->typed_data() + base;
    float* const v = value->typed_data() + base;
    uint32_t* const p = path->typed_data() + base;
    int64_t owner[MOST] = {};  // the first place whose path so far is the same as this one's
    bool ended[MOST] = {};  // at the end of an earlier text
    float worth[MOST];
    uint32_t power = 1;
    for (int64_t w = 0; w < W; w++) numbers[w] = 0, worth[w] = 1;
    for (int64_t c = W * M; c < C; c++) t[c] = up[c] = z[c] = 0, v[c] = 0, p[c] = 0;
    for (int64_t j = 0; j < M; j++, power *= static_cast<uint32_t>(prime)) {
      int64_t before[MOST];
      for (int64_t w = 0; w < W; w++) {
        const int64_t period = std::max<int64_t>(count - 1 - chosen[w].at, 1);
        const int64_t at = std::min(chosen[w].at + 1 + j % period, S - 1);
        t[w * M + j] = text[at];
        ended[w] |= text[at] == SEPARATOR;
        numbers[w] += (static_cast<uint32_t>(text[at]) + 1) * power;
        p[w * M + j] = numbers[w];
        before[w] = owner[w];
        up[w * M + j] = static_cast<int32_t>(j ? before[w] * M + j : 0);
        const int64_t deep = std::min(chosen[w].matched + j, longest) - 1;
        const int64_t start = first_kind + (chosen[w].at < earlier ? 2 * longest : 0);
        z[w * M + j] = static_cast<int32_t>(start + (before[w] == w ? 0 : longest) + deep);
      }
      for (int64_t w = 0; w < W; w++) {
        owner[w] = 0;
        for (int64_t u = 0; u < W; u++)
          if (chosen[u].matched > 0 && numbers[u] == numbers[w]) {
            owner[w] = u;
            break;
          }
        worth[w] *= probability.typed_data()[z[owner[w] * M + j]];
        const bool exists = chosen[w].matched > 0 && !ended[w];
        v[w * M + j] = exists && owner[w] == w ? worth[w] : 0;
      }
    }
  }
  return ffi::Error::Success();
}

// A pool of candidates [B, C], see pool.py.
template <class Number, class Float, class Path, class Flag>
struct Pool {
  Number *tokens, *parents;
  Float* value;
  Number* kind;
  Path* path;
  Flag* guessed;
  int64_t C;
  Pool row(int64_t b) const {
    const int64_t at = b * C;
    return {tokens + at, parents + at, value + at, kind + at, path + at, guessed + at, C};
  }
};
using ReadPool = Pool<const int32_t, const float, const uint32_t, const bool>;
using WritePool = Pool<int32_t, float, uint32_t, bool>;

void copy_to(const WritePool& to, int64_t at, const ReadPool& from) {
  std::copy_n(from.tokens, from.C, to.tokens + at);
  std::copy_n(from.parents, from.C, to.parents + at);
  std::copy_n(from.value, from.C, to.value + at);
  std::copy_n(from.kind, from.C, to.kind + at);
  std::copy_n(from.path, from.C, to.path + at);
  std::copy_n(from.guessed, from.C, to.guessed + at);
}

// Appends the second pool to `to`, which holds the C candidates of the first. A path that is in
// both stays in the first pool and gets the higher value.
void merge(const ReadPool& second, int64_t C, const WritePool& to) {
  copy_to(to, C, second);
  const auto twin_of = [&](int64_t j) {
    int64_t i = 0;
    if (second.value[j] <= 0) return C;
    while (i < C && !(to.value[i] > 0 && to.path[i] == second.path[j])) i++;
    return i;
  };
  for (int64_t j = 0; j < second.C; j++) {
    const int64_t twin = twin_of(j), parent = second.parents[j];
    if (parent > 0) {  // parents come before their children
      const int64_t same = twin_of(parent - 1);
      to.parents[C + j] = static_cast<int32_t>(same < C ? same + 1 : C + parent);
    }
    if (twin == C) continue;
    to.value[C + j] = 0;
    for (int64_t i = twin; i < C; i++) {
      const bool same = to.value[i] > 0 && to.path[i] == second.path[j];
      if (!same || second.value[j] <= to.value[i]) continue;
      to.value[i] = second.value[j];
      to.kind[i] = second.kind[j];
      to.guessed[i] = second.guessed[j];
    }
  }
}

ffi::Error merged(S32 tokens, S32 parents, F32 value, S32 kind, U32 path, Bool guessed,
                  S32 tokens2, S32 parents2, F32 value2, S32 kind2, U32 path2,
                  Bool guessed2, Out<S32> to_tokens, Out<S32> to_parents, Out<F32> to_value,
                  Out<S32> to_kind, Out<U32> to_path, Out<Bool> to_guessed) {
  const int64_t B = tokens.dimensions()[0];
  const int64_t C = tokens.dimensions()[1], C2 = tokens2.dimensions()[1];
  if (C < C2) return refused("want capacity for both pools");
  const ReadPool first{tokens.typed_data(), parents.typed_data(), value.typed_data(),
                    kind.typed_data(),   path.typed_data(),    guessed.typed_data(), C};
  const ReadPool second{tokens2.typed_data(), parents2.typed_data(), value2.typed_data(),
                     kind2.typed_data(),   path2.typed_data(),    guessed2.typed_data(),
                     C2};
  const WritePool to{to_tokens->typed_data(), to_parents->typed_data(), to_value->typed_data(),
                to_kind->typed_data(),   to_path->typed_data(), to_guessed->typed_data(), C};
  for (int64_t b = 0; b < B; b++) {
    if (first.tokens != to.tokens) copy_to(to.row(b), 0, first.row(b));
    merge(second.row(b), C - C2, to.row(b));
  }
  return ffi::Error::Success();
}

// Chooses the T - 1 best candidates of a pool as nodes after the root [B]; see pool.py.
ffi::Error best_nodes(S32 tokens, S32 parents, F32 value, S32 kind, Bool guessed, S32 root,
                      Out<S32> to_tokens, Out<S32> to_parents, Out<F32> to_value,
                      Out<S32> to_kind, Out<Bool> to_guessed, int64_t no_kind) {
  const int64_t B = tokens.dimensions()[0], C = tokens.dimensions()[1];
  const int64_t T = to_tokens->dimensions()[1];
  auto* const place = static_cast<int32_t*>(scratch_of_thread<1>(4 * T));
  for (int64_t b = 0; b < B; b++) {
    const int32_t* const up = parents.typed_data() + b * C;
    const float* const worth = value.typed_data() + b * C;
    int32_t* const token = to_tokens->typed_data() + b * T;
    int32_t* const parent = to_parents->typed_data() + b * T;
    float* const v = to_value->typed_data() + b * T;
    int32_t* const z = to_kind->typed_data() + b * T;
    bool* const guess = to_guessed->typed_data() + b * T;
    token[0] = root.typed_data()[b], parent[0] = -1, v[0] = 1, guess[0] = false;
    z[0] = static_cast<int32_t>(no_kind);
    best_places(worth, C, T - 1, place + 1);
    for (int64_t t = 1; t < T; t++) {
      const int32_t at = place[t];
      const bool exists = at >= 0 && worth[at] > 0;
      token[t] = exists ? tokens.typed_data()[b * C + at] : token[0];
      z[t] = exists ? kind.typed_data()[b * C + at] : static_cast<int32_t>(no_kind);
      v[t] = exists ? worth[at] : 0;
      guess[t] = exists && guessed.typed_data()[b * C + at];
      parent[t] = 0;
      if (!exists) place[t] = -1;
      for (int64_t s = 1; exists && s < t; s++)
        if (up[at] > 0 && place[s] == up[at] - 1) parent[t] = static_cast<int32_t>(s);
    }
  }
  return ffi::Error::Success();
}

// Computes 1 + the sum of the `last` [K] largest values [B, C], as [B, K].
ffi::Error gains(F32 value, S32 last, Out<F32> gained) {
  const int64_t B = value.dimensions()[0], C = value.dimensions()[1];
  const auto K = static_cast<int64_t>(last.element_count());
  auto* const sums = static_cast<float*>(scratch_of_thread<1>((C + 1) * sizeof(float)));
  for (int64_t b = 0; b < B; b++) {
    sums[0] = 1;
    std::copy_n(value.typed_data() + b * C, C, sums + 1);
    std::sort(sums + 1, sums + 1 + C, std::greater<float>());
    for (int64_t i = 0; i < C; i++) sums[i + 1] += sums[i];
    for (int64_t k = 0; k < K; k++)
      gained->typed_data()[b * K + k] = sums[std::clamp<int64_t>(last.typed_data()[k], 0, C)];
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stree

STREE_KERNEL(tree_nodes)
STREE_KERNEL(tree_layout)
STREE_KERNEL(look_up, "earlier", "places", "depth", "longest", "longest_match", "prime",
             "first_kind")
STREE_KERNEL(merged)
STREE_KERNEL(best_nodes, "no_kind")
STREE_KERNEL(gains)
