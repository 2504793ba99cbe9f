// Attention with AMX tiles, for many wide heads that share 16-bit keys and values (latent
// attention). Narrow heads and few queries are computed as with AVX512-BF16.
//
// Keys and queries are multiplied as they are stored. Weights are float32: each is the sum of
// three bfloat16 parts, so that products with 16-bit values are exact.
#include "kernels.h"
#if STREE_AMX
#include <immintrin.h>

#define TARGET                                                                       \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")))

namespace stree {
namespace {

#include "product_body.h"
#include "avx512_lanes.h"
#include "avx512_dots.h"
#include "amx_tiles.h"
#include "lanes.h"
#include "layout.h"
#include "attention_body.h"

struct TiledDots : Bfloat16Dots {};

constexpr int64_t WIDE = 256;        // channels of a head above which tiles are used
constexpr int64_t STEP = LINE / 2;   // numbers per line of a tile
constexpr int64_t KEY_TILES = KEYS / TILE, HALVES = KEYS / STEP;
constexpr int PARTS = 3;

template <>
struct TileProducts<TiledDots> {
  static constexpr bool exist = true;

  TARGET static bool fit(const Attention& a) { return a.hd > WIDE && a.hd % STEP == 0; }

  // Queries [blocks of 16][hd / STEP], values [HALVES][hd / TILE], and the last keys.
  TARGET static int64_t query_bytes(const Attention& a) {
    return blocks_of(a.tile) * (a.hd / STEP) * TILE_BYTES;
  }
  TARGET static int64_t value_bytes(const Attention& a) { return KEYS * a.hd * 2; }
  TARGET static int64_t bytes(const Attention& a) {
    return query_bytes(a) + 2 * value_bytes(a);
  }

  // Packs the tile's queries, which are in space.q.
  TARGET static void pack(const Attention& a, int64_t rows, const Space& space) {
    const auto* q = static_cast<const uint16_t*>(space.q);
    char* to = space.tiles;
    for (int64_t j = 0; j < rows; j += TILE)
      for (int64_t s = 0; s < a.hd; s += STEP, to += TILE_BYTES) {
        __m512 lines[TILE];
        for (int r = 0; r < TILE; r++)
          lines[r] = j + r < rows ? _mm512_loadu_ps(q + (j + r) * a.hd + s)
                                  : _mm512_setzero_ps();
        put_tile(to, lines);
      }
  }

  // Computes the scores of `count` keys.
  TARGET static void scores(const Attention& a, const uint16_t* k, int64_t count,
                            int64_t rows, const Space& space) {
    if (count < KEYS) {
      auto* last =
          reinterpret_cast<uint16_t*>(space.tiles + query_bytes(a) + value_bytes(a));
      __builtin_memcpy(last, k, count * a.hd * 2);
      __builtin_memset(last + count * a.hd, 0, (KEYS - count) * a.hd * 2);
      k = last;
    }
    const Tiles tiles;
    const int64_t steps = a.hd / STEP, stride = a.hd * 2;
    const char* q = space.tiles;
    for (int64_t j = 0; j < rows; j += TILE) {
      clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
      const char* from = reinterpret_cast<const char*>(k);
      for (int64_t s = 0; s < steps; s++, q += TILE_BYTES, from += LINE) {
        load_tile<4>(q, LINE);
        load_tile<5>(from, stride);
        Bfloat16Tiles::dot<0, 5, 4>();
        load_tile<6>(from + TILE * stride, stride);
        Bfloat16Tiles::dot<1, 6, 4>();
        load_tile<5>(from + 2 * TILE * stride, stride);
        Bfloat16Tiles::dot<2, 5, 4>();
        load_tile<6>(from + 3 * TILE * stride, stride);
        Bfloat16Tiles::dot<3, 6, 4>();
      }
      alignas(LINE) float sums[KEY_TILES][TILE][TILE];
      store_tile<0>(sums[0]), store_tile<1>(sums[1]);
      store_tile<2>(sums[2]), store_tile<3>(sums[3]);
      for (int64_t i = 0; i < KEY_TILES; i++) {
        __m512 x[TILE];
        for (int r = 0; r < TILE; r++) x[r] = _mm512_load_ps(sums[i][r]);
        transpose_block(x);
        float* to = space.scores + j * KEYS + i * TILE;
        for (int r = 0; r < TILE && j + r < rows; r++) _mm512_storeu_ps(to + r * KEYS, x[r]);
      }
    }
  }

  // Lane i of a line of weights has key i of 32 in its lower half, and key 16 + i in its upper
  // half. Line i of a tile of values has the values of these two keys.
  TARGET static __m512i joined(__m512i low, __m512i high) {
    const __m512i upper = _mm512_set1_epi32(0xFFFF0000u);
    return _mm512_or_si512(_mm512_srli_epi32(low, 16), _mm512_and_si512(high, upper));
  }

  TARGET static void pack_values(const Attention& a, const uint16_t* v, int64_t count,
                                 char* to) {
    const auto line = [&](int64_t key, int64_t column) TARGET {
      if (key >= count) return _mm512_setzero_si512();
      const auto* from = reinterpret_cast<const __m256i*>(v + key * a.hd + column);
      return _mm512_cvtepu16_epi32(_mm256_loadu_si256(from));
    };
    for (int64_t first = 0; first < KEYS; first += STEP)
      for (int64_t c = 0; c < a.hd; c += TILE, to += TILE_BYTES)
        for (int64_t i = 0; i < TILE; i++) {
          const __m512i high = line(first + TILE + i, c);
          const __m512i both =
              _mm512_or_si512(line(first + i, c), _mm512_slli_epi32(high, 16));
          _mm512_store_si512(to + i * LINE, both);
        }
  }

  // Splits the weights of up to 16 rows for 32 keys.
  TARGET static void split_weights(const float* weights, int64_t rows,
                                   char (&parts)[PARTS][TILE_BYTES]) {
    const __m512i upper = _mm512_set1_epi32(0xFFFF0000u);
    for (int64_t r = 0; r < TILE; r++) {
      __m512 low = _mm512_setzero_ps(), high = low;
      if (r < rows)
        low = _mm512_loadu_ps(weights + r * KEYS),
        high = _mm512_loadu_ps(weights + r * KEYS + TILE);
      for (int i = 0; i < PARTS; i++) {
        const __m512i l = _mm512_castps_si512(low), h = _mm512_castps_si512(high);
        _mm512_store_si512(parts[i] + r * LINE, joined(l, h));
        low = _mm512_sub_ps(low, _mm512_castsi512_ps(_mm512_and_si512(l, upper)));
        high = _mm512_sub_ps(high, _mm512_castsi512_ps(_mm512_and_si512(h, upper)));
      }
    }
  }

  // Adds the values of `count` keys, times the weights in space.scores, to `weighted`.
  TARGET static void add_values(const Attention& a, const uint16_t* v, int64_t count,
                                int64_t rows, const Space& space, float* weighted) {
    char* const values = space.tiles + query_bytes(a);
    pack_values(a, v, count, values);
    const Tiles tiles;
    const int64_t stride = a.hd * 4, half = a.hd / TILE * TILE_BYTES;
    for (int64_t j = 0; j < rows; j += TILE) {
      alignas(LINE) char parts[HALVES][PARTS][TILE_BYTES];
      for (int64_t i = 0; i < HALVES; i++)
        split_weights(space.scores + j * KEYS + i * STEP, rows - j, parts[i]);
      load_tile<2>(parts[0][0], LINE), load_tile<3>(parts[0][1], LINE);
      load_tile<4>(parts[0][2], LINE), load_tile<5>(parts[1][0], LINE);
      load_tile<6>(parts[1][1], LINE), load_tile<7>(parts[1][2], LINE);
      float* to = weighted + j * a.hd;
      const char* from = values;
      for (int64_t c = 0; c < a.hd; c += TILE, from += TILE_BYTES, to += TILE) {
        load_tile<0>(to, stride);
        load_tile<1>(from, LINE);
        Bfloat16Tiles::dot<0, 4, 1>();
        Bfloat16Tiles::dot<0, 3, 1>();
        Bfloat16Tiles::dot<0, 2, 1>();
        load_tile<1>(from + half, LINE);
        Bfloat16Tiles::dot<0, 7, 1>();
        Bfloat16Tiles::dot<0, 6, 1>();
        Bfloat16Tiles::dot<0, 5, 1>();
        store_tile<0>(to, stride);
      }
    }
  }
};

}  // namespace

const AttentionKernel& amx_attention() {
  static constexpr AttentionKernel kernel = attention_kernel<TiledDots>();
  return kernel;
}

}  // namespace stree
#endif
