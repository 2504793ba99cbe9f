// Divides the work of a scan among threads.
#pragma once
#include <algorithm>

#include "kernels.h"
#include "work.h"

namespace stree {

constexpr char OUTSIDE[] = "a path leads out of its tree";

inline bool paths_inside(const Scan& s) {
  for (int64_t b = 0; b < s.batch; b++)
    for (int64_t j = 0; j < std::min<int64_t>(s.length[b], s.M); j++) {
      const int32_t row = s.path[b * s.M + j];
      if (row < 0 || row >= s.past.capacity) return false;
    }
  return true;
}

// Returns the number of flags up to and including the last one set; flags are `apart` bytes
// from each other.
inline int64_t up_to_last(const uint8_t* flags, int64_t count, int64_t apart) {
  while (count > 0 && !flags[(count - 1) * apart]) count--;
  return count;
}

// Counts each row's valid nodes and queries. A padding node is not its own ancestor in the mask.
// `counts` has 2 B elements.
inline void count_nodes(Scan& s, int64_t* counts) {
  for (int64_t b = 0; b < s.batch; b++) {
    const uint8_t* const mask = s.mask + b * s.T * s.T;
    counts[b] = up_to_last(mask, s.T, s.T + 1);
    counts[s.batch + b] = s.rows ? s.Tq : counts[b];
  }
  s.nodes = counts, s.queries = counts + s.batch;
}

inline int64_t group_parts(const Scan& s) {
  const int64_t groups = s.batch * s.G, bytes = 16 * groups * s.Tq * s.N;
  return std::min(groups, std::max<int64_t>(1, bytes / PART_BYTES));
}

inline int64_t head_parts(const Scan& s, int64_t threads) {
  const int64_t heads = s.batch * s.H;
  const int64_t most = std::max<int64_t>(1, heads * s.P * s.N * 4 / PART_BYTES);
  return std::min({most, heads, PARTS_A_THREAD * threads});
}

// Calls work(head, next) for all heads, see ScanKernel.
template <class Work>
void share_heads(xla::ffi::ThreadPool& pool, const Scan& s, const Work& work) {
  const int64_t heads = s.batch * s.H, parts = head_parts(s, pool.num_threads());
  share_out<true>(pool, parts, parts, [&](int64_t part, int64_t after) {
    const int64_t end = heads * (part + 1) / parts;
    const int64_t last = after < parts ? heads * after / parts : -1;
    for (int64_t i = heads * part / parts; i < end; i++) work(i, i + 1 < end ? i + 1 : last);
  });
}

}  // namespace stree
