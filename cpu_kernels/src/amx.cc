// Products with AMX tiles, for Intel CPUs from Sapphire Rapids on.
#include "kernels.h"
#if STREE_AMX
#include <immintrin.h>

#define TARGET                                                                       \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")))

namespace stree {
namespace {

#include "product_body.h"
#include "avx512_lanes.h"
#include "amx_tiles.h"
#include "int8_body.h"

constexpr int PANEL = 2 * TILE;  // rows of the weight that are processed together
constexpr int MAX_BLOCKS = 2;    // blocks of 16 rows of the product, likewise
// Tile registers: sums of weight tile i and row block j; weight tile i; row block j.
constexpr int sums_of(int i, int j) { return 2 * i + j; }
constexpr int weights_of(int i) { return 4 + i; }
constexpr int rows_of(int j) { return 6 + j; }

struct Int8Tiles {
  static constexpr int size = 1;
  template <int S, int W, int R>
  TARGET static inline void dot() {
    dot_tiles<S, W, R>();
  }
};

// While a tile is read, prefetches the tile six steps ahead in the same rows, directly into
// the innermost cache, which needs half the fill buffers. Past the end of the rows, prefetches
// those of the next panel. Always inline: GCC drops calls of a function that only prefetches.
__attribute__((always_inline)) TARGET inline void fetch_ahead(const char* from, int64_t at,
                                                              int64_t stride) {
  constexpr int64_t AHEAD = 6 * LINE;
  from += at + AHEAD < stride ? AHEAD : AHEAD + (PANEL - 1) * stride;
#pragma GCC unroll 16
  for (int r = 0; r < TILE; r++) __builtin_prefetch(from + r * stride, 0, 3);
}

// Loads tile `s` along the rows of the weight. Elements past its rows or columns are 0.
template <int N>
TARGET inline void load_weights(const Weights& w, int first, int64_t s) {
  const char* from = w.from + first * w.stride + s * LINE;
  const int64_t rest = w.bytes - s * LINE;
  if (rest >= LINE && w.count >= first + TILE) return load_tile<N>(from, w.stride);
  alignas(LINE) char tile[TILE][LINE];
  const __mmask64 mask = rest >= LINE ? ~0ull : (1ull << rest) - 1;
  for (int r = 0; r < TILE; r++) {
    const bool exists = first + r < w.count;
    const __m512i line = exists ? _mm512_maskz_loadu_epi8(mask, from + r * w.stride)
                                : _mm512_setzero_si512();
    _mm512_store_si512(tile[r], line);
  }
  load_tile<N>(tile, LINE);
}

// Sums products of a panel of weights and `BLOCKS` blocks of rows, whose tiles are `apart`
// bytes from each other. The weights begin at byte `at` of their rows.
template <class D, int BLOCKS>
TARGET inline void sum_tiles(const Weights& w, int64_t at, const char* rows,
                             int64_t apart) {
  clear_tile<sums_of(0, 0)>(), clear_tile<sums_of(1, 0)>();
  if constexpr (BLOCKS > 1) clear_tile<sums_of(0, 1)>(), clear_tile<sums_of(1, 1)>();
  const int64_t steps = (w.bytes + LINE - 1) / LINE;
  for (int64_t s = 0; s < steps; s++, rows += TILE_BYTES) {
    const char* from = w.from + s * LINE;
    load_tile<rows_of(0)>(rows, LINE);
    fetch_ahead(from, at + s * LINE, w.stride);
    load_weights<weights_of(0)>(w, 0, s);
    D::template dot<sums_of(0, 0), weights_of(0), rows_of(0)>();
    fetch_ahead(from + TILE * w.stride, at + s * LINE, w.stride);
    load_weights<weights_of(1)>(w, TILE, s);
    D::template dot<sums_of(1, 0), weights_of(1), rows_of(0)>();
    if constexpr (BLOCKS > 1) {
      load_tile<rows_of(1)>(rows + apart, LINE);
      D::template dot<sums_of(0, 1), weights_of(0), rows_of(1)>();
      D::template dot<sums_of(1, 1), weights_of(1), rows_of(1)>();
    }
  }
}

struct Sums16 {
  alignas(LINE) float of[2][MAX_BLOCKS][TILE][TILE];  // or int32_t
};

template <int BLOCKS>
TARGET inline void store_tiles(Sums16& sums) {
  store_tile<sums_of(0, 0)>(sums.of[0][0]), store_tile<sums_of(1, 0)>(sums.of[1][0]);
  if constexpr (BLOCKS > 1)
    store_tile<sums_of(0, 1)>(sums.of[0][1]), store_tile<sums_of(1, 1)>(sums.of[1][1]);
}

// Transposes the sums to out[r * m + c] of `t` rows and `count` columns.
TARGET void store_transposed(const Sums16& sums, float* out, int64_t m, int64_t t, int count) {
  for (int i = 0; i * TILE < count; i++) {
    const int left = count - i * TILE;
    const __mmask16 mask = left >= TILE ? 0xFFFF : (1u << left) - 1;
    for (int j = 0; j * TILE < t; j++) {
      __m512 x[TILE];
      for (int r = 0; r < TILE; r++) x[r] = _mm512_load_ps(sums.of[i][j][r]);
      transpose_block(x);
      float* to = out + j * TILE * m + i * TILE;
      for (int r = 0; r < TILE && j * TILE + r < t; r++)
        _mm512_mask_storeu_ps(to + r * m, mask, x[r]);
    }
  }
}

// Calls `panel(column, count, block, blocks left)` for all panels of columns, with one or two
// blocks of rows at a time.
template <class Panel>
TARGET inline void for_panels(const Product& p, int64_t begin, int64_t end,
                              const Panel& panel) {
  const Tiles tiles;
  const int64_t blocks = blocks_of(p.t);
  for (int64_t c = begin; c < end; c += PANEL) {
    const int count = static_cast<int>(end - c < PANEL ? end - c : PANEL);
    for (int64_t block = 0; block < blocks; block += MAX_BLOCKS)
      panel(c, count, block, blocks - block);
  }
}

// Rows in bfloat16, packed as tiles [blocks, steps].
namespace half {

TARGET inline int64_t steps_of(const Product& p) { return (2 * p.k + LINE - 1) / LINE; }

TARGET int64_t packed_bytes(const Product& p) {
  return blocks_of(p.t) * steps_of(p) * TILE_BYTES;
}

TARGET inline __m512 rounded(const float* from, int64_t count) {
  const __m512 low = _mm512_maskz_loadu_ps(some(count), from);
  const __m512 high = _mm512_maskz_loadu_ps(some(count - 16), from + 16);
  return (__m512)_mm512_cvtne2ps_pbh(high, low);
}

TARGET void pack(const Product& p, void* packed) {
  auto* to = static_cast<char*>(packed);
  for (int64_t block = 0; block < blocks_of(p.t); block++)
    for (int64_t s = 0; s < steps_of(p); s++, to += TILE_BYTES) {
      __m512 lines[TILE];
      for (int r = 0; r < TILE; r++) {
        const int64_t row = block * TILE + r, at = s * LINE / 2;
        lines[r] = row < p.t ? rounded(p.rows + row * p.k + at, p.k - at)
                             : _mm512_setzero_ps();
      }
      put_tile(to, lines);
    }
}

TARGET void columns(const Product& p, const void* packed, Columns now, Columns) {
  const auto [begin, end] = now;
  const int64_t steps = steps_of(p), apart = steps * TILE_BYTES, bytes = 2 * p.k;
  const auto panel = [&](int64_t c, int count, int64_t block, int64_t left) TARGET {
    const Weights w{static_cast<const char*>(p.weight) + c * bytes, bytes, bytes, count};
    const char* rows = static_cast<const char*>(packed) + block * apart;
    const int64_t first = block * TILE;
    Sums16 sums;
    if (left > 1) {
      sum_tiles<Bfloat16Tiles, 2>(w, 0, rows, apart);
      store_tiles<2>(sums);
    } else {
      sum_tiles<Bfloat16Tiles, 1>(w, 0, rows, apart);
      store_tiles<1>(sums);
    }
    const int64_t t = p.t - first < 2 * TILE ? p.t - first : 2 * TILE;
    store_transposed(sums, p.out + first * p.m + c, p.m, t, count);
  };
  for_panels(p, begin, end, panel);
}

}  // namespace half

// Rows in int8, quantized per group as in int8_body.h and packed as tiles
// [blocks, groups, steps], with scales [blocks, groups, 16] and a buffer to quantize 16 rows
// of a group.
namespace byte {

struct Packed {
  char* tiles;
  float* scales;
  int8_t* buffer;
  int64_t size, steps, padded, bytes;

  TARGET Packed(const Product& p, void* packed) {
    size = p.k / p.groups, steps = (size + LINE - 1) / LINE, padded = steps * LINE;
    const int64_t groups = blocks_of(p.t) * p.groups;
    tiles = static_cast<char*>(packed);
    bytes = groups * steps * TILE_BYTES;
    scales = reinterpret_cast<float*>(tiles + bytes);
    bytes += groups * LINE;
    buffer = reinterpret_cast<int8_t*>(tiles + bytes);
    bytes += TILE * padded;
  }
};

TARGET int64_t packed_bytes(const Product& p) { return Packed(p, nullptr).bytes; }

TARGET void pack(const Product& p, void* packed) {
  const Packed rows(p, packed);
  char* to = rows.tiles;
  float* scale = rows.scales;
  for (int64_t block = 0; block < blocks_of(p.t); block++)
    for (int64_t g = 0; g < p.groups; g++, scale += TILE) {
      for (int r = 0; r < TILE; r++) {
        const int64_t row = block * TILE + r;
        int8_t* q = rows.buffer + r * rows.padded;
        const float* from = p.rows + row * p.k + g * rows.size;
        scale[r] = quantized(from, row < p.t ? rows.size : 0, rows.padded, q);
      }
      for (int64_t s = 0; s < rows.steps; s++, to += TILE_BYTES) {
        __m512 lines[TILE];
        for (int r = 0; r < TILE; r++)
          lines[r] = _mm512_loadu_ps(rows.buffer + r * rows.padded + s * LINE);
        put_tile(to, lines);
      }
    }
}

// Adds the scaled sums of a group of columns to the totals.
template <int BLOCKS>
TARGET inline void add_scaled(Sums16& totals, const Sums16& sums, const float* row_scales,
                              int64_t apart, const float* scales, int64_t groups,
                              int count) {
  for (int j = 0; j < BLOCKS; j++) {
    const __m512 of_rows = _mm512_loadu_ps(row_scales + j * apart);
    for (int i = 0; i < 2; i++)
      for (int r = 0; r < TILE; r++) {
        const int m = i * TILE + r;
        const float scale = scales[(m < count ? m : count - 1) * groups];
        const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums.of[i][j][r]));
        float* total = totals.of[i][j][r];
        const __m512 scaled = _mm512_mul_ps(of_rows, _mm512_set1_ps(scale));
        _mm512_store_ps(total, _mm512_fmadd_ps(sum, scaled, _mm512_load_ps(total)));
      }
  }
}

template <int BLOCKS>
TARGET void panel_of(const Product& p, const Packed& rows, int64_t c, int count,
                     int64_t block) {
  const int64_t apart = p.groups * rows.steps * TILE_BYTES, first = block * TILE;
  const char* weight = static_cast<const char*>(p.weight) + c * p.k;
  Sums16 totals, sums;
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < BLOCKS; j++)
      for (int r = 0; r < TILE; r++)
        _mm512_store_ps(totals.of[i][j][r], _mm512_setzero_ps());
  for (int64_t g = 0; g < p.groups; g++) {
    const Weights w{weight + g * rows.size, p.k, rows.size, count};
    const char* tiles = rows.tiles + block * apart + g * rows.steps * TILE_BYTES;
    sum_tiles<Int8Tiles, BLOCKS>(w, g * rows.size, tiles, apart);
    store_tiles<BLOCKS>(sums);
    add_scaled<BLOCKS>(totals, sums, rows.scales + (block * p.groups + g) * TILE,
                       p.groups * TILE, p.scale + c * p.groups + g, p.groups, count);
  }
  const int64_t t = p.t - first < BLOCKS * TILE ? p.t - first : BLOCKS * TILE;
  store_transposed(totals, p.out + first * p.m + c, p.m, t, count);
}

TARGET void columns(const Product& p, const void* packed, Columns now, Columns) {
  const auto [begin, end] = now;
  const Packed rows(p, const_cast<void*>(packed));  // only read
  const auto panel = [&](int64_t c, int count, int64_t block, int64_t left) TARGET {
    if (left > 1)
      panel_of<2>(p, rows, c, count, block);
    else
      panel_of<1>(p, rows, c, count, block);
  };
  for_panels(p, begin, end, panel);
}

}  // namespace byte
}  // namespace

const ProductKernel& amx_bfloat16() {
  static constexpr ProductKernel kernel = {half::packed_bytes, half::pack, half::columns,
                                           PANEL, nullptr};
  return kernel;
}

const ProductKernel& amx_int8() {
  static constexpr ProductKernel kernel = {byte::packed_bytes, byte::pack, byte::columns,
                                           PANEL, nullptr};
  return kernel;
}

}  // namespace stree
#endif
