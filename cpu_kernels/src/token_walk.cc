// Walks the bytes of all tokens through an automaton. Called from Python, not from XLA: see
// cpu_kernels/tokens.py, and constraints/token_tables.py for what the hashes are for.
//
// Letters: S states, K kinds of bytes, P pieces of text.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "work.h"

namespace stree {
namespace {

constexpr uint64_t MULTIPLIER = 0x9E3779B97F4A7C15;

// splitmix64: every bit of the result depends on every bit of x.
inline uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// Returns the number of symbols that each piece has in common with the one before it.
std::vector<int64_t> common_lengths(const uint8_t* data, const int64_t* starts, int64_t P) {
  std::vector<int64_t> common(P, 0);
  for (int64_t p = 1; p < P; p++) {
    const uint8_t *const before = data + starts[p - 1], *const here = data + starts[p];
    const int64_t most =
        std::min(starts[p] - starts[p - 1], starts[p + 1] - starts[p]);
    while (common[p] < most && before[common[p]] == here[common[p]]) common[p]++;
  }
  return common;
}

}  // namespace
}  // namespace stree

// Adds to hashes [P] a number for each state from which a piece may follow and the state after it,
// and counts these pieces for each state: counts [S].
//
// steps [S, K] are the states after each kind of byte, negative if it is not allowed. Piece p is
// data[starts[p] .. starts[p + 1]), the kinds of its bytes. Pieces are sorted, so that what two
// neighbours have in common is walked once.
STREE_PUBLIC void stree_token_walk(const int32_t* steps, int64_t S, int64_t K, const uint8_t* data,
                                   const int64_t* starts, int64_t P, uint64_t* hashes,
                                   int64_t* counts) {
  const std::vector<int64_t> common = stree::common_lengths(data, starts, P);
  int64_t longest = 0;
  for (int64_t p = 0; p < P; p++) longest = std::max(longest, starts[p + 1] - starts[p]);
  std::vector<int64_t> begins(K + 1, P);  // of the pieces that begin with each symbol
  for (int64_t p = P - 1; p >= 0; p--) begins[data[starts[p]]] = p;
  for (int64_t k = K - 1; k >= 0; k--) begins[k] = std::min(begins[k], begins[k + 1]);
  std::vector<int32_t> at(longest + 1);  // the states after 0, 1, ... symbols
  for (int64_t state = 0; state < S; state++) counts[state] = 0;
  for (int64_t run = 0; run < S * K; run++) {
    const int64_t state = run / K, first = run % K;
    if (steps[run] < 0) continue;
    const uint64_t mark = static_cast<uint64_t>(2 * state + 1) * stree::MULTIPLIER;
    at[0] = static_cast<int32_t>(state);
    int64_t allowed = 0;  // symbols of the last piece that are
    for (int64_t p = begins[first]; p < begins[first + 1]; p++) {
      if (common[p] > allowed) continue;  // it has the symbol that is not
      const uint8_t* const piece = data + starts[p];
      const int64_t size = starts[p + 1] - starts[p];
      allowed = common[p];
      int32_t after = at[allowed];
      while (allowed < size && (after = steps[after * K + piece[allowed]]) >= 0)
        at[++allowed] = after;
      if (allowed < size) continue;
      hashes[p] += stree::mixed((static_cast<uint64_t>(at[size]) + mark) * stree::MULTIPLIER);
      counts[state]++;
    }
  }
}
