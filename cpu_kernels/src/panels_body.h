// Products of few rows with packed weights, for the vectors of one instruction set.
//
// Included once per instruction set, inside its namespace, after panels_kinds.h. Like
// product_body.h it must not use inline functions of standard headers. The including file defines:
//   W               lanes of a vector: rows of the weight
//   SIZES           for n rows up to 16: the number of rows in the first group
//   Number          the numbers of a vector, in the form that `add_dot` takes
//   Sum<P>          sums of W lanes, begun by `begun<P>(int)`; `total` returns integers
//   FOUR<P>         bytes of four numbers of a rounded row; `put_block<P>` writes eight of these
//   PLANES<P>       P, or 2 if the same code computes any number of planes
//   BY_ROW          true if a block's eight vectors stay in registers, false if a sum per row does
//   UNROLLED        vectors per iteration, unless BY_ROW
//   FETCH           true if weights are prefetched
//
// The order of operations is fixed. A row's result is therefore equal, bit for bit, for any number
// of rows and threads and for any instruction set. A row is rounded in groups of columns. Sums over
// a span of 16 or 32 columns are exact integers. They are added to the sum of their group in order,
// each with one fused multiply-add, and groups are added in order. Minima are multiplied with the
// sum of the rounded row, and added in the same way.

#include "panels_shared.h"

// How the rows of a product are packed: in groups of `SIZES` rows. A group has blocks of
// numbers, each followed by a number per span and row, and then scales [k / columns][rows].
struct PanelRows {
  int64_t k, columns, planes, spans;

  TARGET static int64_t rounded_up(int64_t n) { return (n + 63) / 64 * 64; }
  TARGET int64_t block_bytes(int64_t rows) const {
    return rows * (8 * (planes == 2 ? FOUR<2> : FOUR<1>) + 4 * spans);
  }
  TARGET int64_t scales_at(int64_t rows) const {
    return rounded_up(k / BLOCK * block_bytes(rows));
  }
  TARGET int64_t bytes(int64_t rows) const {
    return scales_at(rows) + rounded_up(4 * rows * (k / columns));
  }
};

TARGET inline int together(int64_t rows) { return SIZES[rows < 16 ? rows : 16]; }

template <class K, int P>
TARGET PanelRows rows_of(const Product& p) {
  return {p.k, rounded_columns(p.k, P), P, 32 / K::span};
}

template <class K, int P>
TARGET int64_t panels_packed_bytes(const Product& p) {
  const PanelRows rows = rows_of<K, P>(p);
  int64_t bytes = 0;
  for (int64_t first = 0; first < p.t; first += together(p.t - first))
    bytes += rows.bytes(together(p.t - first));
  return bytes;
}

// Packs `count` rows for `rows` rows that are computed together; the others are 0. `zero` and
// `mins` are those of the kind.
template <int P>
TARGET __attribute__((noinline)) void pack_together(const float* from, int count, int rows,
                                                    const PanelRows& as, int zero, bool mins,
                                                    char* to) {
  float* const scales = reinterpret_cast<float*>(to + as.scales_at(rows));
  const int64_t stride = as.block_bytes(rows), span = 32 / as.spans;
  alignas(64) int16_t q[256];
  for (int r = 0; r < rows; r++)
    for (int64_t g = 0; g < as.k / as.columns; g++) {
      float scale = 0.0f;
      if (r < count)
        scale = rounded_group(from + r * as.k + g * as.columns, as.columns,
                              P == 2 ? 32512.0f : 127.0f, q);
      else
        for (int64_t i = 0; i < as.columns; i++) q[i] = 0;
      scales[g * rows + r] = scale;
      for (int64_t b = 0; b < as.columns / BLOCK; b++) {
        char* const block = to + (g * as.columns / BLOCK + b) * stride;
        put_block<P>(block + r * FOUR<P>, rows * FOUR<P>, q + BLOCK * b);
        for (int64_t s = 0; s < as.spans; s++) {
          int32_t sum = 0;
          for (int64_t i = 0; i < span; i++) sum += q[BLOCK * b + span * s + i];
          const float min_factor = static_cast<float>(sum);
          const int32_t begin = -zero * sum;
          char* const place = block + 8 * FOUR<P> * rows + 4 * (s * rows + r);
          __builtin_memcpy(place, mins ? static_cast<const void*>(&min_factor) : &begin, 4);
        }
      }
    }
}

template <class K, int P>
TARGET void panels_pack(const Product& p, void* packed) {
  const PanelRows as = rows_of<K, P>(p);
  auto* to = static_cast<char*>(packed);
  for (int64_t first = 0; first < p.t;) {
    const int rows = together(p.t - first);
    const int count = static_cast<int>(p.t - first < rows ? p.t - first : rows);
    pack_together<P>(p.rows + first * p.k, count, rows, as, K::zero, K::mins, to);
    to += as.bytes(rows), first += count;
  }
}

// Adds a block to the sums of its group, for R rows, or with one plane, for which a block is a
// group, to the totals. `x` are the packed rows of the block, `row_scale` their scales, `i` the
// block's number within its tile.
template <class K, int R, int P>
INLINE void add_block(Floats (&acc)[R], const uint8_t* block, const typename K::Scales& scales,
                      int i, const char* x, const float* row_scale, Weights weights) {
  constexpr int spans = 32 / K::span, vectors = 8 / spans;
  Bytes w[8];
  if constexpr (FETCH)
    unpack<K>(w, block, weights);
  else
    unpack<K>(w, block, vector_at<Bytes>);
  const char* const extra = x + 8 * FOUR<P> * R;
  Floats scale[spans], min;
#pragma GCC unroll 2
  for (int s = 0; s < spans; s++) scale[s] = scales.scale(spans * i + s);
  if constexpr (K::mins) min = scales.min(i);
  const auto first = [&](int s, int r) LAMBDA {
    int32_t begin = 0;
    if constexpr (!K::mins) __builtin_memcpy(&begin, extra + 4 * (s * R + r), 4);
    return begun<P>(begin);
  };
  const auto add = [&](int r, const Sum<P>(&sums)[spans]) LAMBDA {
    Floats part = P == 1 ? Floats{} : acc[r];
#pragma GCC unroll 2
    for (int s = 0; s < spans; s++)
      part = fused(__builtin_convertvector(total(sums[s]), Floats), scale[s], part);
    if constexpr (K::mins) {
      float factor;
      __builtin_memcpy(&factor, extra + 4 * r, 4);
      part = fused(all(factor), min, part);
    }
    acc[r] = P == 1 ? fused(part, all(row_scale[r]), acc[r]) : part;
  };
  if constexpr (BY_ROW) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      Sum<P> sums[spans];
#pragma GCC unroll 2
      for (int s = 0; s < spans; s++) {
        sums[s] = first(s, r);
#pragma GCC unroll 8
        for (int v = s * vectors; v < (s + 1) * vectors; v++)
          add_dot<P>(sums[s], Number(w[v]), x + (v * R + r) * FOUR<P>);
      }
      add(r, sums);
    }
  } else {
    Sum<P> sums[R][spans];
#pragma GCC unroll 2
    for (int s = 0; s < spans; s++) {
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) sums[r][s] = first(s, r);
#pragma GCC unroll UNROLLED
      for (int v = s * vectors; v < (s + 1) * vectors; v++) {
        const Number number(w[v]);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) add_dot<P>(sums[r][s], number, x + (v * R + r) * FOUR<P>);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) add(r, sums[r]);
  }
}

// Computes W lanes from `lane` on of a panel, for R rows: totals [R][W].
template <class K, int R, int P>
TARGET __attribute__((noinline)) void panel_of_rows(const uint8_t* panel, int lane, const char* x,
                                                    const PanelRows& as, float* totals) {
  constexpr int stride = R * (8 * FOUR<P> + 4 * (32 / K::span));
  constexpr bool tile_is_group = PLANES<1> == 1 && K::blocks == 8;
  const auto* scale = reinterpret_cast<const float*>(x + as.scales_at(R));
  const int64_t tiles = as.k / (K::blocks * BLOCK), blocks = as.columns / BLOCK;
  Floats acc[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    acc[r] = Floats{};
    __builtin_memcpy(totals + r * W, &acc[r], sizeof acc[r]);
  }
  const Weights weights{fetch_ahead(R)};
  int64_t left = blocks;
  int of_tile = K::blocks;
  asm("" : "+r"(of_tile));  // otherwise GCC repeats the code of a block for each of two
  for (int64_t t = 0; t < tiles; t++, panel += K::bytes) {
    const typename K::Scales scales(panel, lane);
    for (int b = 0; b < of_tile; b++, x += stride) {
      const auto* const block = panel + K::numbers + b * K::block_bytes + 4 * lane;
      add_block<K, R, P>(acc, block, scales, b, x, scale, weights);
      if constexpr (P == 1) {
        scale += R;
      } else if constexpr (!tile_is_group) {
        if (--left == 0) {
          add_group<R>(acc, scale, totals);
          scale += R, left = blocks;
        }
      }
    }
    if constexpr (P == 2 && tile_is_group) {
      add_group<R>(acc, scale, totals);
      scale += R;
    }
  }
  if constexpr (P == 1) __builtin_memcpy(totals, acc, sizeof acc);
}

template <class K, int P>
TARGET void panels_columns(const Product& p, const void* packed, Columns now, Columns) {
  const PanelRows as = rows_of<K, P>(p);
  const int64_t bytes = p.k / (K::blocks * BLOCK) * K::bytes;
  alignas(64) float totals[16 * W];
  for (int64_t c = now.begin; c < now.end; c += PANEL) {
    const auto* const panel = static_cast<const uint8_t*>(p.weight) + c / PANEL * bytes;
    const auto* x = static_cast<const char*>(packed);
    for (int64_t first = 0; first < p.t;) {
      const int rows = together(p.t - first);
      const int count = static_cast<int>(p.t - first < rows ? p.t - first : rows);
      for (int lane = 0; lane < PANEL; lane += W) {
        switch (rows) {
#define STREE_ROWS(R)                                                               \
  case R:                                                                           \
    if constexpr (SIZES[R] == R)                                                 \
      panel_of_rows<K, R, PLANES<P>>(panel, lane, x, as, totals);                 \
    break;
          STREE_ROWS(1) STREE_ROWS(2) STREE_ROWS(3) STREE_ROWS(4)
          STREE_ROWS(6) STREE_ROWS(8) STREE_ROWS(12) STREE_ROWS(16)
#undef STREE_ROWS
        }
        put_totals(totals, count, p.m, now.end - c - lane, p.out + first * p.m + c + lane);
      }
      x += as.bytes(rows), first += count;
    }
  }
}

template <class K, int P>
constexpr ProductKernel panel_kernel() {
  return {panels_packed_bytes<K, P>, panels_pack<K, P>, panels_columns<K, P>, PANEL, nullptr};
}

template <class... Ks>
struct PanelKernels {
  static constexpr PanelProduct kernels[] = {{{panel_kernel<Ks, 1>(), panel_kernel<Ks, 2>()}}...};
};
