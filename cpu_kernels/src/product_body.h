// Products of few rows, for the lanes of one instruction set.
//
// Included once for every instruction set, inside its namespace, with TARGET defined.
// No standard header's inline function is used here: the linker keeps one copy of such a
// function for the whole library, and it must not be the one made for AVX-512.
//
// A result is the sum of one accumulator over k, in steps of `step`, and then over its
// lanes. It knows nothing of other rows, columns or threads.

constexpr int COLUMNS = 4;  // of a block; their weights are consecutive in memory

TARGET inline int64_t rounded_up(int64_t n, int64_t step) {
  return (n + step - 1) / step * step;
}

// What is to be in the caches for the next block: `bytes` from `next` on are fetched during
// each step of this one. Not sooner: memory is to be busy all the time, and what waits for
// it keeps rows from coming out of the outer caches.
struct Ahead {
  const char* next;
  int64_t bytes;  // a step, be they whole lines or not
  bool all;       // caches, or the outer ones alone
  const char* until;

  TARGET Ahead(const char* from, int64_t bytes, bool all)
      : next(from), bytes(bytes), all(all), until(from) {}

  // Always inline: GCC drops calls of a function that does nothing but this.
  __attribute__((always_inline)) TARGET inline void fetch() {
    for (until += bytes; next < until; next += 64) {
      if (all)
        __builtin_prefetch(next, 0, 3);
      else
        __builtin_prefetch(next, 0, 2);
    }
  }
};

// out[r * stride + c] of R rows and 4 columns, of which `count` are wanted. Where loops
// over rows are not unrolled early, GCC has the sums in memory, too.
template <class L, int R>
TARGET void product_block(const typename L::Row* rows, int64_t row_stride,
                          const typename L::Weight* const (&weight)[COLUMNS],
                          int64_t k, Ahead ahead, float* out, int64_t stride,
                          int count) {
  typename L::Sum sum[R][COLUMNS];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < COLUMNS; c++) sum[r][c] = L::zero();
  const int64_t whole = k / L::step;
  for (int64_t s = 0; s < whole; s++) {
    ahead.fetch();
    typename L::Loaded w[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) w[c] = L::weight(weight[c] + s * L::step);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const auto x = L::row(rows + r * row_stride + s * L::step);
      for (int c = 0; c < COLUMNS; c++) sum[r][c] = L::dot(sum[r][c], w[c], x);
    }
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
  for (int r = 0; r < R; r++) L::store(out + r * stride, sum[r], count);
}

// 4 columns of all t rows, which are taken in equal blocks of at most L::most_rows.
template <class L>
TARGET void product_rows(const typename L::Row* rows, int64_t row_stride, int64_t t,
                         const typename L::Weight* weight, int64_t k, const char* next,
                         float* out, int64_t stride, int count) {
  const typename L::Weight* columns[COLUMNS];
  for (int c = 0; c < COLUMNS; c++)  // past the last column: the last one again
    columns[c] = weight + (c < count ? c : count - 1) * k;
  const int64_t blocks = (t + L::most_rows - 1) / L::most_rows;
  const int64_t steps = k / L::step ? k / L::step : 1;
  const int64_t bytes = COLUMNS * k * static_cast<int64_t>(sizeof(*weight));
  const int64_t each = (bytes + blocks * steps - 1) / (blocks * steps);
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t first = b * t / blocks, last = (b + 1) * t / blocks;
    const auto* x = rows + first * row_stride;
    float* y = out + first * stride;
    const Ahead ahead(next + b * steps * each, each, false);
    switch (last - first) {
#define STREE_BLOCK(R)                                                               \
  case R:                                                                            \
    if constexpr (R <= L::most_rows)                                                 \
      product_block<L, R>(x, row_stride, columns, k, ahead, y, stride, count);       \
    break;
      STREE_BLOCK(1)
      STREE_BLOCK(2)
      STREE_BLOCK(3)
      STREE_BLOCK(4)
      STREE_BLOCK(5)
      STREE_BLOCK(6)
#undef STREE_BLOCK
    }
  }
}

// Numbers from one packed row to the next: a line more where all rows would fall into
// the same few sets of the cache.
template <class L>
TARGET int64_t packed_stride(int64_t k) {
  const int64_t stride = rounded_up(k, L::step);
  const bool alike = stride * static_cast<int64_t>(sizeof(typename L::Row)) % 1024 == 0;
  return stride + (alike ? L::step : 0);
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

template <class L>
TARGET void product_columns(const Product& p, const void* packed, int64_t begin,
                            int64_t end) {
  const auto* rows = static_cast<const typename L::Row*>(packed);
  const auto* weight = static_cast<const typename L::Weight*>(p.weight);
  const int64_t stride = packed_stride<L>(p.k);
  for (int64_t c = begin; c < end; c += COLUMNS) {
    const int count = static_cast<int>(end - c < COLUMNS ? end - c : COLUMNS);
    const auto* next = reinterpret_cast<const char*>(weight + (c + COLUMNS) * p.k);
    product_rows<L>(rows, stride, p.t, weight + c * p.k, p.k, next, p.out + c, p.m,
                    count);
  }
}

template <class L>
constexpr ProductKernel product_kernel() {
  return {product_packed_bytes<L>, product_pack<L>, product_columns<L>, COLUMNS};
}

#include "bfloat16.h"
