// Products with packed weights, with AMX tiles, for more than a few rows.
//
// A block of 32 columns of a panel, once unpacked to signed bytes, is a tile of weights as it is.
// A tile of rows has up to 16 rows of one plane. Sums of a block are stored, and added to their
// group in the same order and with the same results as with AVX512-VNNI.
#include "panels.h"
#if STREE_AMX
#include <immintrin.h>

#define TARGET                                                                       \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")))

namespace stree {
namespace {

#include "panels_avx512.h"
#include "panels_kinds.h"
#include "panels_shared.h"
#include "amx_instructions.h"

// Fewer rows are left to AVX512-VNNI, which multiplies them while their weights arrive. So are
// kinds with spans of 16 columns: tiles have twice the sums to store, and are no faster.
constexpr int64_t LEAST_ROWS = 5;
template <class K>
TARGET bool by_tiles(const Product& p) {
  return K::span == 32 && p.t >= LEAST_ROWS;
}

// Blocks that are unpacked ahead of the one that is multiplied: a tile that is loaded from what is
// still on its way to the cache waits for it. And the blocks that buffers hold. All as measured on
// an Intel Xeon of 2023.
constexpr int64_t UNPACKED = 4, RING = 8, SUMS = 2;

// Tile registers for two blocks in turns: sums of a plane, rows of a plane, weights.
constexpr int sums_of(int turn, int plane) { return 2 * turn + plane; }
constexpr int rows_of(int plane) { return 4 + plane; }
constexpr int weights_of(int turn) { return 6 + turn; }

// Configures this thread's tiles for `rows` rows, for the lifetime of the object.
class PanelTiles {
 public:
  explicit PanelTiles(int rows) {
    alignas(64) TileShapes shapes{};
    for (int i = 0; i < 8; i++) {
      const bool of_rows = i == rows_of(0) || i == rows_of(1);
      shapes.bytes[i] = static_cast<uint16_t>(of_rows ? BLOCK : 64);
      shapes.rows[i] = static_cast<uint8_t>(i < weights_of(0) ? rows : BLOCK / 4);
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

// The stages of the blocks of a panel: unpack, multiply with R rows, store the sums, add them. The
// stages of several blocks alternate, so that none waits for what has just been stored.
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
    unpack<K>(w, block, Weights{fetch_ahead(R)});
    const __m512i zero = _mm512_set1_epi8(static_cast<char>(K::zero));
#pragma GCC unroll 8
    for (int v = 0; v < 8; v++)
      _mm512_store_si512(weights_[i % RING][v],
                         K::zero ? _mm512_sub_epi8((__m512i)w[v], zero) : (__m512i)w[v]);
    scale_[i % RING] = scales.scale(b);
    if constexpr (K::mins) min_[i % RING] = scales.min(b);
  }

  // Multiplies block i.
  INLINE void multiply(int64_t i) {
    if (i % 2 == 0)
      multiply_by<0>(i);
    else
      multiply_by<1>(i);
  }

  // Stores the sums of block i.
  INLINE void store(int64_t i) {
    if (i % 2 == 0)
      store_by<0>(i);
    else
      store_by<1>(i);
  }

  // Adds the sums of block i to those of its group, or with one plane, for which a block is a
  // group, to the totals.
  INLINE void add(int64_t i, Floats (&acc)[R]) {
    const auto& sums = sums_[i % SUMS];
    const Floats scale = scale_[i % RING], min = min_[i % RING];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      Ints sum = vector_at<Ints>(sums[0][r]);
      if constexpr (P == 2) sum += vector_at<Ints>(sums[1][r]) << 8;
      Floats part = P == 1 ? Floats{} : acc[r];
      part = fused(__builtin_convertvector(sum, Floats), scale, part);
      if constexpr (K::mins) part = fused(all(of_rows_[i * R + r]), min, part);
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
  template <int TURN>
  INLINE void multiply_by(int64_t i) {
    constexpr int line = BLOCK * P;
    const char* const rows = x_ + i * (R * line);
    load_tile<weights_of(TURN)>(weights_[i % RING], 64);
    load_tile<rows_of(0)>(rows, line);
    clear_tile<sums_of(TURN, 0)>();
    dot_tiles<sums_of(TURN, 0), rows_of(0), weights_of(TURN)>();
    if constexpr (P == 2) {
      load_tile<rows_of(1)>(rows + BLOCK, line);
      clear_tile<sums_of(TURN, 1)>();
      dot_tiles<sums_of(TURN, 1), rows_of(1), weights_of(TURN)>();
    }
  }

  template <int TURN>
  INLINE void store_by(int64_t i) {
    store_tile<sums_of(TURN, 0)>(sums_[i % SUMS][0], 64);
    if constexpr (P == 2) store_tile<sums_of(TURN, 1)>(sums_[i % SUMS][1], 64);
  }

  alignas(64) uint8_t weights_[RING][8][64];
  alignas(64) int32_t sums_[SUMS][P][R][W];
  Floats scale_[RING], min_[RING];
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
  const int64_t blocks = as.k / BLOCK;
  // Goes on with blocks that have been unpacked. Sums are stored when they are complete.
  const auto go_on = [&](int64_t multiplied, int64_t added) LAMBDA {
    if (added >= 0) stages.add(added, acc);
    if (multiplied > 0 && multiplied <= blocks) stages.store(multiplied - 1);
  };
  int64_t i = 0;
  for (; i < blocks; panel += K::bytes) {
    const typename K::Scales scales(panel, 0);
    for (int b = 0; b < of_tile; b++, i++) {
      if (i >= UNPACKED) stages.multiply(i - UNPACKED);
      stages.unpack_block(i, panel + K::numbers + b * K::block_bytes, scales, b);
      go_on(i - UNPACKED, i - UNPACKED - 2);
    }
  }
  for (; i < blocks + UNPACKED + 2; i++) {
    if (i >= UNPACKED && i < blocks + UNPACKED) stages.multiply(i - UNPACKED);
    go_on(i - UNPACKED, i - UNPACKED - 2);
  }
  if constexpr (P == 1) __builtin_memcpy(totals, acc, sizeof acc);
}

template <class K, int P>
const ProductKernel& by_vectors() {
  return avx512_vnni_panels()[K::kind].planes[P - 1];
}

template <class K, int P>
int64_t amx_packed_bytes(const Product& p) {
  if (!by_tiles<K>(p)) return by_vectors<K, P>().packed_bytes(p);
  const TileRows as(p, P);
  return as.groups * as.bytes();
}

template <class K, int P>
void amx_pack(const Product& p, void* packed) {
  if (!by_tiles<K>(p)) return by_vectors<K, P>().pack(p, packed);
  pack_tiles(p, P, packed);
}

template <class K, int P>
TARGET void columns_by_tiles(const Product& p, const void* packed, Columns now) {
  const TileRows as(p, P);
  const PanelTiles tiles(static_cast<int>(as.rows));
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
void amx_columns(const Product& p, const void* packed, Columns now, Columns next) {
  if constexpr (K::span == 32)
    if (by_tiles<K>(p)) return columns_by_tiles<K, P>(p, packed, now);
  by_vectors<K, P>().columns(p, packed, now, next);
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
