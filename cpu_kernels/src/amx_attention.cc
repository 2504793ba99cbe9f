// Attention with AMX tiles, for wide heads that share 16-bit keys (latent attention). Narrow heads,
// and products with values, are computed as with AVX512-BF16: a tile would sum over pairs of keys.
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
constexpr int64_t KEY_TILES = KEYS / TILE;

template <>
struct TileProducts<TiledDots> {
  static constexpr bool exist = true;

  TARGET static bool fit(const Attention& a) { return a.hd > WIDE && a.hd % STEP == 0; }

  // Queries [blocks of 16][hd / STEP], and the last keys.
  TARGET static int64_t query_bytes(const Attention& a) {
    return blocks_of(a.tile) * (a.hd / STEP) * TILE_BYTES;
  }
  TARGET static int64_t bytes(const Attention& a) { return query_bytes(a) + KEYS * a.hd * 2; }

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

  // Computes the scores [rows, KEYS] of `count` keys.
  TARGET static void scores(const Attention& a, const uint16_t* k, int64_t count,
                            int64_t rows, const Space& space, float* scores) {
    if (count < KEYS) {
      auto* last = reinterpret_cast<uint16_t*>(space.tiles + query_bytes(a));
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
        float* to = scores + j * KEYS + i * TILE;
        for (int r = 0; r < TILE && j + r < rows; r++) _mm512_storeu_ps(to + r * KEYS, x[r]);
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
