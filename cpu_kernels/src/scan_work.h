// Divides the work of a scan among threads.
#pragma once
#include <algorithm>
#include <cstring>

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

constexpr char NO_TREE[] = "want the mask of a tree, with parents before their children";

// Finds a row's parents, the last ancestors before each node in the mask. Returns false if a node
// does not have its parent's ancestors. Padding between nodes has no parent.
inline bool find_parents(const Scan& s, int64_t b, int32_t* parents) {
  for (int64_t t = 0; t < s.nodes[b]; t++) {
    const uint8_t* const mask = s.mask + (b * s.T + t) * s.T;
    const int64_t parent = mask[t] ? up_to_last(mask, t, 1) - 1 : -1;
    parents[t] = static_cast<int32_t>(parent);
    if (!mask[t]) continue;
    if (parent >= 0 && std::memcmp(mask, mask - (t - parent) * s.T, parent + 1) != 0) return false;
    if (up_to_last(mask, s.T, 1) != t + 1) return false;
  }
  return true;
}

// Sorts a row's queries by their nodes' parents. Padding queries have no place.
inline void sort_queries(const Scan& s, int64_t b, const int32_t* parents, int32_t* place,
                         int32_t* query, int32_t* children) {
  const auto for_each = [&](const auto& call) {
    for (int64_t q = 0; q < s.queries[b]; q++) {
      const int64_t t = s.rows ? s.rows[q] : q;
      if (t < s.nodes[b]) call(q, parents[t] + 1);
    }
  };
  std::fill_n(children, s.T + 2, 0);
  for_each([&](int64_t, int32_t parent) { children[parent + 1]++; });
  for (int64_t i = 0; i <= s.T; i++) children[i + 1] += children[i];
  std::fill_n(place, s.Tq, 0);
  for_each([&](int64_t q, int32_t parent) {
    place[q] = children[parent]++, query[place[q]] = static_cast<int32_t>(q);
  });
  for (int64_t i = s.T + 1; i > 0; i--) children[i] = children[i - 1];
  children[0] = 0;
}

// Gives a slot to every node whose state is read: one of its descendants is a query. The last of
// the children that are such nodes takes its parent's slot. Returns how many slots there are.
inline int64_t give_slots(const Scan& s, int64_t b, const int32_t* parents,
                          const int32_t* children, int32_t* slot, int32_t* free) {
  constexpr int32_t NONE = -1, NEEDED = -2;
  const int64_t nodes = s.nodes[b];
  int32_t* const last = free + s.T;  // the last of a node's children that needs a slot
  for (int64_t t = 0; t < s.T; t++)
    slot[t] = t < nodes && children[t + 1] < children[t + 2] ? NEEDED : NONE, last[t] = NONE;
  for (int64_t t = nodes - 1; t >= 0; t--) {
    if (slot[t] != NEEDED || parents[t] < 0) continue;
    slot[parents[t]] = NEEDED;
    if (last[parents[t]] < 0) last[parents[t]] = static_cast<int32_t>(t);
  }
  int64_t count = 0, freed = 0;
  for (int64_t t = 0; t < nodes; t++) {
    if (slot[t] == NONE) continue;
    const int32_t parent = parents[t];
    if (parent >= 0 && last[parent] == t)
      slot[t] = slot[parent];
    else
      slot[t] = freed > 0 ? free[--freed] : static_cast<int32_t>(count++);
    if (last[t] < 0) free[freed++] = slot[t];  // only its products with C are needed
  }
  return count;
}

// Plans the walk: see the fields of `Scan`. Returns false if the mask is not that of a tree. A
// padding node is not its own ancestor in the mask.
inline bool plan(Scan& s) {
  const int64_t each = 3 * s.T + 2 * s.Tq + 2, bytes = 4 * (s.batch * each + 2 * s.T);
  auto* const counts =
      static_cast<int64_t*>(scratch_of_thread<2>(16 * s.batch + bytes));
  auto* const parents = reinterpret_cast<int32_t*>(counts + 2 * s.batch);
  int32_t* const slot = parents + s.batch * s.T;
  int32_t* const place = slot + s.batch * s.T;
  int32_t* const query = place + s.batch * s.Tq;
  int32_t* const children = query + s.batch * s.Tq;
  int32_t* const free = children + s.batch * (s.T + 2);
  s.nodes = counts, s.queries = counts + s.batch, s.slots = 0;
  s.parents = parents, s.slot = slot, s.place = place, s.query = query, s.children = children;
  for (int64_t b = 0; b < s.batch; b++) {
    counts[b] = up_to_last(s.mask + b * s.T * s.T, s.T, s.T + 1);
    counts[s.batch + b] = s.rows ? s.Tq : counts[b];
    if (!find_parents(s, b, parents + b * s.T)) return false;
    sort_queries(s, b, parents + b * s.T, place + b * s.Tq, query + b * s.Tq,
                 children + b * (s.T + 2));
    s.slots = std::max(s.slots, give_slots(s, b, parents + b * s.T, children + b * (s.T + 2),
                                           slot + b * s.T, free));
  }
  return true;
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
