// Products with packed weights, with AMX tiles, for more than a few rows.
//
// A block of 32 columns of a panel, once unpacked to signed bytes, is a tile of weights as it is.
// A tile of rows has up to 16 rows of one plane. Sums of a span are stored and added to their
// group as with AVX512-VNNI, in the same order: the bits are the same.
#include "panels.h"
#if STREE_AMX
#include <immintrin.h>

#define TARGET                                                                       \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")))

namespace stree {
namespace {

#include "panels_avx512.h"
#include "panels_kinds.h"
#include "panels_rounded.h"
#include "amx_instructions.h"

// Least rows for which tiles are used, by planes: below, AVX512-VNNI is as fast as memory.
constexpr int64_t LEAST_ROWS[] = {0, 5, 5};

// Blocks that are unpacked before one is multiplied, and multiplied before its sums are added: a
// tile that is loaded from what is still on its way to the cache waits for it.
constexpr int64_t UNPACKED = 3;
constexpr int64_t RING = 8, SUMS = 2;  // blocks that buffers hold; measured on Sapphire Rapids

// Tile registers, of which spans take turns: sums of a plane, rows of a plane, weights.
constexpr int sums_of(int turn, int plane) { return 2 * turn + plane; }
constexpr int rows_of(int plane) { return 4 + plane; }
constexpr int weights_of(int turn) { return 6 + turn; }

// Configures this thread's tiles, for the lifetime of the object, for `rows` rows and spans of
// `span` columns.
class PanelTiles {
 public:
  PanelTiles(int rows, int span) {
    alignas(64) TileShapes shapes{};
    for (int i = 0; i < 8; i++) {
      const bool of_rows = i == rows_of(0) || i == rows_of(1);
      shapes.bytes[i] = static_cast<uint16_t>(of_rows ? span : 64);
      shapes.rows[i] = static_cast<uint8_t>(i < weights_of(0) ? rows : span / 4);
    }
    configure_tiles(shapes);
  }
  ~PanelTiles() { release_tiles(); }
};

// How rows are packed: groups of `rows` rows. A group has lines [k / 32][rows][planes][32] of
// bytes, scales [k / columns][rows], and sums of the rounded rows [k / 32][rows] for minima.
struct TileRows {
  int64_t t, k, planes, groups, rows, columns;

  TileRows(const Product& p, int64_t planes)
      : t(p.t), k(p.k), planes(planes), groups((t + 15) / 16), columns(rounded_columns(k, planes)) {
    const int64_t least = (t + groups - 1) / groups;
    rows = least <= 8 ? 8 : least <= 12 ? 12 : 16;
  }
  int64_t scales_at() const { return k * rows * planes; }
  int64_t sums_at() const { return scales_at() + 4 * rows * (k / columns); }
  int64_t bytes() const { return (sums_at() + 4 * rows * (k / BLOCK) + 63) / 64 * 64; }
  int64_t count(int64_t group) const {
    const int64_t left = t - group * rows;
    return left < 0 ? 0 : left < rows ? left : rows;
  }
};

// Packs row r of a group.
TARGET void pack_row(const float* from, const TileRows& as, int64_t r, char* to) {
  alignas(64) int16_t q[256];
  auto* const scales = reinterpret_cast<float*>(to + as.scales_at());
  auto* const sums = reinterpret_cast<float*>(to + as.sums_at());
  const float most = as.planes == 2 ? 32512.0f : 127.0f;
  for (int64_t g = 0; g < as.k / as.columns; g++) {
    scales[g * as.rows + r] = rounded_group(from + g * as.columns, as.columns, most, q);
    for (int64_t i = 0; i < as.columns; i += BLOCK) {
      const int64_t block = (g * as.columns + i) / BLOCK;
      auto* const line = reinterpret_cast<int8_t*>(to + (block * as.rows + r) * BLOCK * as.planes);
      int32_t sum = 0;
      for (int j = 0; j < BLOCK; j++) {
        line[j] = static_cast<int8_t>(q[i + j]);  // q - 256 * high
        sum += q[i + j];
      }
      if (as.planes == 2)
        for (int j = 0; j < BLOCK; j++)
          line[BLOCK + j] = static_cast<int8_t>((q[i + j] + 128) >> 8);
      sums[block * as.rows + r] = static_cast<float>(sum);
    }
  }
}

TARGET void pack_tiles(const Product& p, int64_t planes, void* packed) {
  const TileRows as(p, planes);
  for (int64_t g = 0; g < as.groups; g++) {
    char* const to = static_cast<char*>(packed) + g * as.bytes();
    if (as.count(g) < as.rows) __builtin_memset(to, 0, as.bytes());
    for (int64_t r = 0; r < as.count(g); r++)
      pack_row(p.rows + (g * as.rows + r) * p.k, as, r, to);
  }
}

// The stages of the blocks of a panel: unpack, multiply with R rows, add the sums. While a block is
// multiplied, the next one is unpacked and the sums of the last one are added: tiles that are
// loaded from what has just been stored would wait.
template <class K, int R, int P>
class Stages {
 public:
  INLINE Stages(const char* x, const TileRows& as, float* totals)
      : x_(x), row_scale_(reinterpret_cast<const float*>(x + as.scales_at())),
        of_rows_(reinterpret_cast<const float*>(x + as.sums_at())), blocks_(as.columns / BLOCK),
        left_(blocks_), totals_(totals) {}

  // Unpacks block i of a panel, which is block b of its tile.
  INLINE void unpack_block(int64_t i, const uint8_t* block, const typename K::Scales& scales,
                           int b) {
    Bytes w[8];
    unpack<K>(w, block, vector_at<Bytes>);
    const __m512i zero = _mm512_set1_epi8(static_cast<char>(K::zero));
#pragma GCC unroll 8
    for (int v = 0; v < 8; v++)
      _mm512_store_si512(weights_[i % RING][v],
                         K::zero ? _mm512_sub_epi8((__m512i)w[v], zero) : (__m512i)w[v]);
#pragma GCC unroll 2
    for (int s = 0; s < SPANS; s++) scale_[i % RING][s] = scales.scale(SPANS * b + s);
    if constexpr (K::mins) min_[i % RING] = scales.min(b);
  }

  // Multiplies block i and stores the sums of its spans and planes.
  INLINE void multiply(int64_t i) {
    const char* const rows = x_ + i * (R * BLOCK * P);
    if constexpr (SPANS == 2) {
      multiply_span<0, 0>(i, rows);
      multiply_span<1, 1>(i, rows);
    } else if (i % 2 == 0) {
      multiply_span<0, 0>(i, rows);
    } else {
      multiply_span<0, 1>(i, rows);
    }
  }

  // Stores the sums of the last block, i.
  INLINE void finish(int64_t i) {
    if (SPANS == 2 || i % 2 == 1) store_span<1>();
    else store_span<0>();
  }

  // Adds the sums of block i to those of its group, or with one plane, for which a block is a
  // group, to the totals.
  INLINE void add(int64_t i, Floats (&acc)[R]) {
    const auto& sums = sums_[i % SUMS];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      Floats part = P == 1 ? Floats{} : acc[r];
#pragma GCC unroll 2
      for (int s = 0; s < SPANS; s++) {
        Ints sum = vector_at<Ints>(sums[s][0][r]);
        if constexpr (P == 2) sum += vector_at<Ints>(sums[s][1][r]) << 8;
        part = fused(__builtin_convertvector(sum, Floats), scale_[i % RING][s], part);
      }
      if constexpr (K::mins) part = fused(all(of_rows_[i * R + r]), min_[i % RING], part);
      acc[r] = P == 1 ? fused(part, all(row_scale_[r]), acc[r]) : part;
    }
    if constexpr (P == 1) {
      row_scale_ += R;
    } else if (--left_ == 0) {
      add_group<R>(acc, row_scale_, totals_);
      row_scale_ += R, left_ = blocks_;
    }
  }

 private:
  static constexpr int SPANS = 32 / K::span;

  template <int S, int T>  // span S, in tiles of turn T
  INLINE void multiply_span(int64_t i, const char* rows) {
    constexpr int line = BLOCK * P;
    load_tile<weights_of(T)>(weights_[i % RING] + S * (K::span / 4), 64);
    load_tile<rows_of(0)>(rows + S * K::span, line);
    clear_tile<sums_of(T, 0)>();
    dot_tiles<sums_of(T, 0), rows_of(0), weights_of(T)>();
    if constexpr (P == 2) {
      load_tile<rows_of(1)>(rows + S * K::span + BLOCK, line);
      clear_tile<sums_of(T, 1)>();
      dot_tiles<sums_of(T, 1), rows_of(1), weights_of(T)>();
    }
    store_span<1 - T>();
    place_ = sums_[i % SUMS][S];
  }

  template <int T>
  INLINE void store_span() {
    store_tile<sums_of(T, 0)>(place_[0], 64);
    if constexpr (P == 2) store_tile<sums_of(T, 1)>(place_[1], 64);
  }

  alignas(64) uint8_t weights_[RING][8][64];
  alignas(64) int32_t sums_[SUMS][SPANS][P][R][W];
  Floats scale_[RING][SPANS], min_[RING];
  int32_t (*place_)[R][W] = sums_[SUMS - 1][0];  // of the sums that are stored next
  const char* x_;
  const float *row_scale_, *of_rows_;
  int64_t blocks_, left_;
  float* totals_;
};

// Computes a panel for R rows: totals [R][W].
template <class K, int R, int P>
TARGET __attribute__((noinline)) void panel_by_tiles(const uint8_t* panel, const char* x,
                                                     const TileRows& as, float* totals) {
  Stages<K, R, P> stages(x, as, totals);
  Floats acc[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    acc[r] = Floats{};
    __builtin_memcpy(totals + r * W, &acc[r], sizeof acc[r]);
  }
  int of_tile = K::blocks;
  asm("" : "+r"(of_tile));  // otherwise GCC repeats the code of a block for each of two
  constexpr int64_t UNTIL_ADDED = UNPACKED + (K::span == 16 ? 1 : 2);
  const int64_t blocks = as.k / BLOCK;
  int64_t i = 0;
  for (; i < blocks; panel += K::bytes) {
    const typename K::Scales scales(panel, 0);
    for (int b = 0; b < of_tile; b++, i++) {
      if (i >= UNPACKED) stages.multiply(i - UNPACKED);
      stages.unpack_block(i, panel + K::numbers + b * K::block_bytes, scales, b);
      if (i >= UNTIL_ADDED) stages.add(i - UNTIL_ADDED, acc);
    }
  }
  for (; i < blocks + UNTIL_ADDED; i++) {
    if (i >= UNPACKED && i < blocks + UNPACKED) stages.multiply(i - UNPACKED);
    if (i == blocks + UNPACKED) stages.finish(blocks - 1);
    if (i >= UNTIL_ADDED) stages.add(i - UNTIL_ADDED, acc);
  }
  if constexpr (P == 1) __builtin_memcpy(totals, acc, sizeof acc);
}

template <class K, int P>
const ProductKernel& by_vectors() {
  return avx512_vnni_panels()[K::kind].planes[P - 1];
}

template <class K, int P>
int64_t amx_packed_bytes(const Product& p) {
  if (p.t < LEAST_ROWS[P]) return by_vectors<K, P>().packed_bytes(p);
  const TileRows as(p, P);
  return as.groups * as.bytes();
}

template <class K, int P>
void amx_pack(const Product& p, void* packed) {
  if (p.t < LEAST_ROWS[P]) return by_vectors<K, P>().pack(p, packed);
  pack_tiles(p, P, packed);
}

template <class K, int P>
TARGET void amx_columns(const Product& p, const void* packed, Columns now, Columns next) {
  if (p.t < LEAST_ROWS[P]) return by_vectors<K, P>().columns(p, packed, now, next);
  const TileRows as(p, P);
  const PanelTiles tiles(static_cast<int>(as.rows), K::span);
  const int64_t bytes = p.k / (K::blocks * BLOCK) * K::bytes;
  alignas(64) float totals[16 * W];
  for (int64_t c = now.begin; c < now.end; c += PANEL) {
    const auto* const panel = static_cast<const uint8_t*>(p.weight) + c / PANEL * bytes;
    for (int64_t g = 0; g < as.groups; g++) {
      const auto* const x = static_cast<const char*>(packed) + g * as.bytes();
      if (as.rows == 8)
        panel_by_tiles<K, 8, P>(panel, x, as, totals);
      else if (as.rows == 12)
        panel_by_tiles<K, 12, P>(panel, x, as, totals);
      else
        panel_by_tiles<K, 16, P>(panel, x, as, totals);
      put_totals(totals, as.count(g), p.m, now.end - c, p.out + g * as.rows * p.m + c);
    }
  }
}

template <class K, int P>
constexpr ProductKernel amx_kernel() {
  return {amx_packed_bytes<K, P>, amx_pack<K, P>, amx_columns<K, P>, PANEL, nullptr};
}

template <class... Ks>
struct AmxKernels {
  static constexpr PanelProduct kernels[] = {{{amx_kernel<Ks, 1>(), amx_kernel<Ks, 2>()}}...};
};

}  // namespace

const PanelProduct* amx_panels() { return AllKinds<AmxKernels>::kernels; }

}  // namespace stree
#endif
