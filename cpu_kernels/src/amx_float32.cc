// float32 products with AMX tiles of bfloat16.
//
// A float32 number is the sum of three bfloat16 parts, which together hold its 24 bits. Of the
// nine products of the parts of two numbers, the six largest are summed; the others are below
// 2^-22 of the product. The parts of rows are rounded and those of weights truncated: rounding
// one factor is enough for the omitted terms to have either sign.
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

constexpr int PARTS = 3, STEP = 2 * TILE;  // STEP: numbers per line of a tile
constexpr int PANEL = 2 * TILE;            // columns that are processed together
constexpr int AHEAD = 3;  // weights are prefetched this many steps before they are split

using Parts = char[PARTS][TILE_BYTES];

TARGET inline int64_t steps_of(const Product& p) { return (p.k + STEP - 1) / STEP; }

// Tiles of fewer than 16 rows are narrow: they are read again for every column and should stay
// in the innermost cache.
TARGET inline int wide(const Product& p) { return p.t < TILE ? static_cast<int>(p.t) : TILE; }

TARGET inline int64_t line_of(const Product& p) { return 4 * wide(p); }

TARGET int64_t packed_bytes(const Product& p) {
  return blocks_of(p.t) * steps_of(p) * PARTS * TILE * line_of(p);
}

// Splits 32 numbers into parts. Lane i of a part holds number i in its lower half and number
// 16 + i in its upper half.
template <bool ROUNDED>
struct Split {
  __m512i part[PARTS];

  TARGET inline Split(__m512 low, __m512 high) {
    const __m512i upper = _mm512_set1_epi32(0xFFFF0000u), half = _mm512_set1_epi32(0x8000);
    for (int i = 0; i < PARTS; i++) {
      __m512i l = _mm512_castps_si512(low), h = _mm512_castps_si512(high);
      if (ROUNDED && i < PARTS - 1)  // the last part is exact
        l = _mm512_add_epi32(l, half), h = _mm512_add_epi32(h, half);
      constexpr int OR_AND = 0xF8;
      part[i] = _mm512_ternarylogic_epi32(_mm512_srli_epi32(l, 16), h, upper, OR_AND);
      low = _mm512_sub_ps(low, _mm512_castsi512_ps(_mm512_and_si512(l, upper)));
      high = _mm512_sub_ps(high, _mm512_castsi512_ps(_mm512_and_si512(h, upper)));
    }
  }

  // Loads `count` numbers; the others are 0.
  TARGET inline Split(const float* from, int64_t count)
      : Split(_mm512_maskz_loadu_ps(some(count), from),
              _mm512_maskz_loadu_ps(some(count - 16), from + 16)) {}
};

// Packs the rows as tiles [blocks, steps, parts].
TARGET void pack(const Product& p, void* packed) {
  auto* to = static_cast<char*>(packed);
  for (int64_t block = 0; block < blocks_of(p.t); block++)
    for (int64_t s = 0; s < steps_of(p); s++) {
      __m512 lines[PARTS][TILE];
      for (int r = 0; r < TILE; r++) {
        const int64_t row = block * TILE + r, at = s * STEP;
        const float* from = row < p.t ? p.rows + row * p.k + at : p.rows;
        const Split<true> x(from, row < p.t ? p.k - at : 0);
        for (int i = 0; i < PARTS; i++) lines[i][r] = _mm512_castsi512_ps(x.part[i]);
      }
      for (int i = 0; i < PARTS; i++) {
        transpose_block(lines[i]);
        for (int j = 0; j < TILE; j++, to += line_of(p))
          _mm512_mask_storeu_ps(to, some(wide(p)), lines[i][j]);
      }
    }
}

// Splits 16 rows of a weight into parts, a third of them at a time. Only `count` rows are valid.
// The thirds are interleaved with tile instructions, because they do not depend on them.
struct Splitter {
  const float* from;  // first number of this step
  int64_t k, left;    // numbers per row, and numbers left in the row from here on
  int count;
  const float* fetched;
  Parts& to;

  template <int THIRD>
  TARGET inline void split() const {
    if (left <= 0) return;
    constexpr int begin = THIRD * TILE / 3, end = (THIRD + 1) * TILE / 3;
    const bool whole = left >= STEP && count >= TILE;
#pragma GCC unroll 2
    for (int r = begin; r < end; r++) {
      __builtin_prefetch(fetched + r * k, 0, 3);
      __builtin_prefetch(fetched + r * k + TILE, 0, 3);
      if (whole)
        put(r, {_mm512_loadu_ps(from + r * k), _mm512_loadu_ps(from + r * k + TILE)});
      else
        put(r, r < count ? Split<false>(from + r * k, left) : Split<false>(from, 0));
    }
  }

  TARGET inline void put(int r, const Split<false>& x) const {
    for (int i = 0; i < PARTS; i++) _mm512_store_si512(to[i] + r * LINE, x.part[i]);
  }
};

// Tile registers: two pairs of sums (of large and of small products); three parts of the
// operand that both pairs share; one register for the parts of the other operand.
constexpr int most_of(int pair) { return 2 * pair; }
constexpr int rest_of(int pair) { return 2 * pair + 1; }
constexpr int SHARED = 4, OWN = 7;

TARGET inline void load_shared(const char* parts, int64_t line) {
  load_tile<SHARED>(parts, line), load_tile<SHARED + 1>(parts + TILE * line, line);
  load_tile<SHARED + 2>(parts + 2 * TILE * line, line);
}

// Adds the products of a tile of weights with the shared rows.
template <int PAIR>
TARGET inline void add_weights(const Parts& weights, const Splitter& next) {
  using D = Bfloat16Tiles;
  load_tile<OWN>(weights[2], LINE);
  D::dot<rest_of(PAIR), OWN, SHARED>();
  next.split<0>();
  load_tile<OWN>(weights[1], LINE);
  D::dot<most_of(PAIR), OWN, SHARED>();
  D::dot<rest_of(PAIR), OWN, SHARED + 1>();
  next.split<1>();
  load_tile<OWN>(weights[0], LINE);
  D::dot<most_of(PAIR), OWN, SHARED>();
  D::dot<rest_of(PAIR), OWN, SHARED + 2>();
  D::dot<most_of(PAIR), OWN, SHARED + 1>();
  next.split<2>();
}

// Adds the same products in the same order, of a tile of rows with the shared weights.
template <int PAIR>
TARGET inline void add_rows(const char* rows, const Splitter& next) {
  using D = Bfloat16Tiles;
  load_tile<OWN>(rows, LINE);
  D::dot<rest_of(PAIR), SHARED + 2, OWN>();
  D::dot<most_of(PAIR), SHARED + 1, OWN>();
  D::dot<most_of(PAIR), SHARED, OWN>();
  if constexpr (PAIR == 0) next.split<0>();
  load_tile<OWN>(rows + TILE_BYTES, LINE);
  D::dot<rest_of(PAIR), SHARED + 1, OWN>();
  D::dot<most_of(PAIR), SHARED, OWN>();
  if constexpr (PAIR == 0) next.split<1>();
  load_tile<OWN>(rows + 2 * TILE_BYTES, LINE);
  D::dot<rest_of(PAIR), SHARED, OWN>();
  if constexpr (PAIR == 1) next.split<2>();
}

struct Sums {
  alignas(LINE) float of[2][2][TILE][TILE];  // [pair, large or small, column, row]
};

// Sums the products of columns [first, first + 32) and one block of rows, or of 16 columns and
// two blocks of rows (`BLOCKS`).
template <int BLOCKS>
TARGET inline void sum_parts(const Product& p, const char* rows, int64_t first, int count,
                             Sums& sums) {
  constexpr int TILES = 3 - BLOCKS;
  const int64_t steps = steps_of(p), line = line_of(p), tiles = PARTS * TILE * line;
  const auto* weight = static_cast<const float*>(p.weight) + first * p.k;
  alignas(LINE) Parts parts[2][TILES];
  const auto splitter = [&](int tile, int64_t s) TARGET {
    // Past the end of these columns, prefetch the next ones.
    const int64_t fetched = (s + AHEAD < steps ? 0 : TILES * TILE * p.k - steps * STEP);
    const float* from = weight + tile * TILE * p.k + s * STEP;
    return Splitter{from, p.k, p.k - s * STEP, count - tile * TILE,
                    from + AHEAD * STEP + fetched, parts[s % 2][tile]};
  };
  for (int i = 0; i < TILES; i++) {
    const Splitter begin = splitter(i, 0);
    begin.split<0>(), begin.split<1>(), begin.split<2>();
  }
  clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
  for (int64_t s = 0; s < steps; s++, rows += tiles) {
    const auto& now = parts[s % 2];
    // Touch the pages of the next columns one by one, because their first steps need all of
    // them at once.
    __builtin_prefetch(weight + TILES * TILE * (p.k + s * STEP), 0, 2);
    if constexpr (BLOCKS > 1) {
      const Splitter next = splitter(0, s + 1);
      load_shared(now[0][0], LINE);
      add_rows<0>(rows, next);
      add_rows<1>(rows + steps * tiles, next);
    } else {
      load_shared(rows, line);
      add_weights<0>(now[0], splitter(0, s + 1));
      add_weights<1>(now[1], splitter(1, s + 1));
    }
  }
  store_tile<0>(sums.of[0][0]), store_tile<1>(sums.of[0][1]);
  store_tile<2>(sums.of[1][0]), store_tile<3>(sums.of[1][1]);
}

// Transposes the sums to out[r * m + c] of `t` rows and `count` of 16 columns.
TARGET void store_transposed(const float (&sums)[2][TILE][TILE], float* out, int64_t m, int64_t t,
                     int64_t count) {
  if (count <= 0) return;
  __m512 x[TILE];
  for (int c = 0; c < TILE; c++)
    x[c] = _mm512_add_ps(_mm512_load_ps(sums[0][c]), _mm512_load_ps(sums[1][c]));
  transpose_block(x);
  for (int r = 0; r < TILE && r < t; r++)
    _mm512_mask_storeu_ps(out + r * m, some(count), x[r]);
}

TARGET void columns(const Product& p, const void* packed, Columns now, Columns) {
  const auto [begin, end] = now;
  // With one block of rows, the tiles of sums and rows are narrow; with more, none is.
  constexpr unsigned NARROW = 0b1111 | 0b111 << SHARED;
  const Tiles tiles(wide(p), NARROW);
  const auto* rows = static_cast<const char*>(packed);
  const int64_t apart = steps_of(p) * PARTS * TILE * line_of(p), blocks = blocks_of(p.t);
  Sums sums;
  for (int64_t c = begin; c < end; c += PANEL)
    for (int64_t block = 0; block < blocks; block += 2) {
      float* out = p.out + block * TILE * p.m;
      const int64_t t = p.t - block * TILE;
      if (block + 1 == blocks) {
        sum_parts<1>(p, rows + block * apart, c, static_cast<int>(end - c), sums);
        for (int64_t i = 0, at = c; i < 2; i++, at += TILE)
          store_transposed(sums.of[i], out + at, p.m, t, end - at);
        continue;
      }
      for (int64_t at = c; at < c + PANEL && at < end; at += TILE) {
        sum_parts<2>(p, rows + block * apart, at, static_cast<int>(end - at), sums);
        store_transposed(sums.of[0], out + at, p.m, t, end - at);
        store_transposed(sums.of[1], out + TILE * p.m + at, p.m, t - TILE, end - at);
      }
    }
}

}  // namespace

const ProductKernel& amx_float32() {
  static constexpr ProductKernel kernel = {packed_bytes, pack, columns, PANEL, nullptr};
  return kernel;
}

}  // namespace stree
#endif
