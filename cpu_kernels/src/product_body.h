// Products of few rows with a weight, for the vectors of one instruction set.
//
// Included once per instruction set, inside its namespace, with TARGET defined. It must not use
// inline functions of standard headers: the linker keeps one copy of such a function for the
// whole library, which could be the one compiled for AVX-512.
//
// A result is summed over a chunk of k in one accumulator, in steps of `step`, and then over its
// lanes. Chunks, whose number depends only on k, are added in order. The result therefore does
// not depend on other rows, columns or threads, bit for bit.

// Expands to one switch case for every number of rows in a block.
#define STREE_UP_TO_6(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)

constexpr int COLUMNS = 4;   // columns of a block; their weights are consecutive in memory
constexpr int IN_ORDER = 2;  // blocks of up to this many rows may read columns one by one
constexpr int64_t PANEL_COLUMNS = 16;     // columns for which a group of rows stays in the cache
constexpr int64_t GROUP_ROWS = 18;        // most rows of such a group
constexpr int64_t CHUNK_BYTES = 1536;     // bytes of a row per chunk, about
constexpr int64_t NEAR_BYTES = 40 << 10;  // bytes that stay in the cache next to prefetched data
constexpr int64_t DISTANCE = 12 << 10;    // bytes between the data being read and prefetched

TARGET inline int64_t rounded_up(int64_t n, int64_t step) {
  return (n + step - 1) / step * step;
}

// The first `count` of COUNT numbers, followed by zeros.
template <class T, int COUNT>
struct Tail {
  T values[COUNT];
  TARGET inline Tail(const T* from, int count) {
    for (int i = 0; i < COUNT; i++) values[i] = i < count ? from[i] : T(0);
  }
};

// Prefetches data for the next block, `bytes` per step of this one. Spreading the prefetches
// over the steps keeps memory busy all the time, and leaves buffers for the loads of rows from
// the outer caches.
struct Ahead {
  const char* next;
  int64_t bytes;  // bytes per step, not necessarily whole cache lines
  bool all;       // true: into all caches; false: into the outer ones only
  const char* until;

  TARGET Ahead(const char* from, int64_t bytes, bool all)
      : next(from), bytes(bytes), all(all), until(from) {}

  // Always inline: GCC drops calls of a function that only prefetches.
  __attribute__((always_inline)) TARGET inline void fetch() {
    for (until += bytes; next < until; next += 64) {
      if (all)
        __builtin_prefetch(next, 0, 3);
      else
        __builtin_prefetch(next, 0, 2);
    }
  }
};

// Adds the sums to those already in `out`.
template <class L>
TARGET inline void store_more(float* out, const typename L::Sum (&sum)[COLUMNS], int count) {
  typedef float Four __attribute__((vector_size(16)));
  Four before, these;
  float numbers[COLUMNS];
  L::store(numbers, sum, COLUMNS);
  if (count < COLUMNS) {
    for (int c = 0; c < count; c++) out[c] += numbers[c];
    return;
  }
  __builtin_memcpy(&before, out, sizeof before);
  __builtin_memcpy(&these, numbers, sizeof these);
  before += these;
  __builtin_memcpy(out, &before, sizeof before);
}

// Adds whole steps of R rows and N columns from `first` on, reading the columns in turn.
template <class L, int R, int N>
TARGET inline __attribute__((always_inline)) void add_steps(
    typename L::Sum (&sum)[R][COLUMNS], int first, const typename L::Row* rows,
    int64_t row_stride, const typename L::Weight* const (&weight)[COLUMNS], int64_t steps,
    Ahead& ahead) {
  for (int64_t s = 0; s < steps; s++) {
    if (s % (COLUMNS / N) == 0) ahead.fetch();  // once per step of all four columns
    typename L::Loaded w[N];
    for (int c = 0; c < N; c++) w[c] = L::weight(weight[first + c] + s * L::step);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const auto x = L::row(rows + r * row_stride + s * L::step);
      for (int c = 0; c < N; c++) sum[r][first + c] = L::dot(sum[r][first + c], w[c], x);
    }
  }
}

// Computes out[r * stride + c] for R rows and `count` <= 4 columns; adds to it if `more` is true.
// The loops over rows are unrolled explicitly: otherwise GCC also keeps the sums in memory.
template <class L, int R>
TARGET void product_block(const typename L::Row* rows, int64_t row_stride,
                          const typename L::Weight* const (&weight)[COLUMNS],
                          int64_t k, Ahead& from_here, float* out, int64_t stride,
                          int count, bool more) {
  Ahead ahead = from_here;
  typename L::Sum sum[R][COLUMNS];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < COLUMNS; c++) sum[r][c] = L::zero();
  const int64_t whole = k / L::step;
  if (R <= IN_ORDER && columns_in_order) {
#pragma GCC unroll 4
    for (int c = 0; c < COLUMNS; c++)
      add_steps<L, R, 1>(sum, c, rows, row_stride, weight, whole, ahead);
  } else {
    add_steps<L, R, COLUMNS>(sum, 0, rows, row_stride, weight, whole, ahead);
  }
  if (const int rest = static_cast<int>(k - whole * L::step)) {
    typename L::Loaded w[COLUMNS];
    for (int c = 0; c < COLUMNS; c++)
      w[c] = L::weight_tail(weight[c] + whole * L::step, rest);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const auto x = L::row(rows + r * row_stride + whole * L::step);
      for (int c = 0; c < COLUMNS; c++) sum[r][c] = L::dot(sum[r][c], w[c], x);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    if (more)
      store_more<L>(out + r * stride, sum[r], count);
    else
      L::store(out + r * stride, sum[r], count);
  }
  from_here = ahead;
}

// Returns the number of equal blocks, of at most L::most_rows rows each, for t rows.
template <class L>
TARGET inline int64_t blocks_of(int64_t t) {
  return (t + L::most_rows - 1) / L::most_rows;
}

// Computes up to 4 columns of all t rows, block by block.
template <class L>
TARGET void product_rows(const typename L::Row* rows, int64_t row_stride, int64_t t,
                         const typename L::Weight* weight, int64_t weight_stride, int64_t k,
                         Ahead& ahead, float* out, int64_t stride, int count, bool more) {
  const typename L::Weight* columns[COLUMNS];
  for (int c = 0; c < COLUMNS; c++)  // past the last column, repeat it
    columns[c] = weight + (c < count ? c : count - 1) * weight_stride;
  const int64_t blocks = blocks_of<L>(t);
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t first = b * t / blocks, last = (b + 1) * t / blocks;
    const auto* x = rows + first * row_stride;
    float* y = out + first * stride;
    switch (last - first) {
#define STREE_BLOCK(R)                                                               \
  case R:                                                                            \
    if constexpr (R <= L::most_rows)                                                 \
      product_block<L, R>(x, row_stride, columns, k, ahead, y, stride, count, more); \
    break;
      STREE_UP_TO_6(STREE_BLOCK)
#undef STREE_BLOCK
    }
  }
}

// The same for short rows, which need no chunks. Prefetches the data at `next`.
template <class L>
TARGET void product_rows(const typename L::Row* rows, int64_t row_stride, int64_t t,
                         const typename L::Weight* weight, int64_t k, const char* next,
                         float* out, int64_t stride, int count) {
  const int64_t steps = blocks_of<L>(t) * (k / L::step ? k / L::step : 1);
  const int64_t bytes = COLUMNS * k * static_cast<int64_t>(sizeof(*weight));
  Ahead ahead(next, (bytes + steps - 1) / steps, false);
  product_rows<L>(rows, row_stride, t, weight, k, k, ahead, out, stride, count, false);
}

// Returns the stride of packed rows. Adds a cache line if otherwise all rows would map to the
// same few sets of the cache.
template <class L>
TARGET int64_t packed_stride(int64_t k) {
  const int64_t stride = rounded_up(k, L::step);
  const bool same_sets = stride * static_cast<int64_t>(sizeof(typename L::Row)) % 1024 == 0;
  return stride + (same_sets ? L::step : 0);
}

template <class L>
TARGET int64_t product_packed_bytes(const Product& p) {
  return p.t * packed_stride<L>(p.k) * static_cast<int64_t>(sizeof(typename L::Row));
}

template <class L>
TARGET void product_pack(const Product& p, void* packed) {
  const int64_t stride = packed_stride<L>(p.k);
  for (int64_t r = 0; r < p.t; r++) {
    const float* from = p.rows + r * p.k;
    auto* to = static_cast<typename L::Row*>(packed) + r * stride;
    for (int64_t i = 0; i < p.k; i++) to[i] = L::as_row(from[i]);
    for (int64_t i = p.k; i < stride; i++) to[i] = 0;
  }
}

// Panels are not needed if all rows and a block's weights fit in the innermost cache. Then it is
// fastest to read the weights sequentially.
template <class L>
TARGET int64_t product_piece(const Product& p) {
  const int64_t bytes = p.k * static_cast<int64_t>(sizeof(typename L::Row));
  return p.t == 1 || (p.t + COLUMNS) * bytes <= NEAR_BYTES ? 0 : PANEL_COLUMNS;
}

// Computes a panel of columns, chunk by chunk of k. A group of rows stays in the innermost cache
// while the weights of a few columns stream through it and those of the next ones are prefetched.
template <class L>
TARGET void product_panel(const Product& p, const void* packed, Columns now, Columns next) {
  const auto* rows = static_cast<const typename L::Row*>(packed);
  const auto* weight = static_cast<const typename L::Weight*>(p.weight);
  const int64_t stride = packed_stride<L>(p.k), steps = p.k / L::step;
  const int64_t chunk = CHUNK_BYTES / static_cast<int64_t>(L::step * sizeof(*rows));
  const int64_t chunks = steps > chunk ? (steps + chunk - 1) / chunk : 1;
  const int64_t groups = (p.t + GROUP_ROWS - 1) / GROUP_ROWS;
  int64_t blocks = 0;
  for (int64_t g = 0; g < groups; g++)
    blocks += blocks_of<L>((g + 1) * p.t / groups - g * p.t / groups);
  const int64_t all = (now.end - now.begin + COLUMNS - 1) / COLUMNS * blocks * (steps ? steps : 1);
  const int64_t bytes = (next.end - next.begin) * p.k * static_cast<int64_t>(sizeof(*weight));
  // With three or more blocks of rows, the next four columns of a short weight would be prefetched
  // too late: prefetch at a fixed distance instead.
  const bool apart = product_piece<L>(p) == 0 && blocks_of<L>(p.t) > 2;
  const auto* const from = reinterpret_cast<const char*>(weight + (apart ? now : next).begin * p.k);
  Ahead ahead(from + (apart ? DISTANCE : 0), (bytes + all - 1) / all, into_all_caches);
  for (int64_t g = 0; g < groups; g++) {
    const int64_t first = g * p.t / groups, count = (g + 1) * p.t / groups - first;
    for (int64_t h = 0; h < chunks; h++) {
      const int64_t from = steps * h / chunks * L::step;
      const int64_t to = h + 1 < chunks ? steps * (h + 1) / chunks * L::step : p.k;
      for (int64_t c = now.begin; c < now.end; c += COLUMNS)
        product_rows<L>(rows + first * stride + from, stride, count, weight + c * p.k + from,
                        p.k, to - from, ahead, p.out + first * p.m + c, p.m,
                        static_cast<int>(now.end - c < COLUMNS ? now.end - c : COLUMNS), h > 0);
    }
  }
}

template <class L>
TARGET void product_columns(const Product& p, const void* packed, Columns now, Columns next) {
  if (product_piece<L>(p)) return product_panel<L>(p, packed, now, next);
  for (int64_t c = now.begin; c < now.end; c += COLUMNS) {
    const int64_t end = c + COLUMNS < now.end ? c + COLUMNS : now.end;
    product_panel<L>(p, packed, {c, end}, {end, end + COLUMNS < now.end ? end + COLUMNS : now.end});
  }
}

template <class L>
constexpr ProductKernel product_kernel() {
  return {product_packed_bytes<L>, product_pack<L>, product_columns<L>, COLUMNS,
          product_piece<L>};
}

#include "bfloat16.h"
