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
constexpr int64_t LEAST_ROWS[] = {0, 9, 5};

// Tile registers: the sums of a span and a plane, the rows of a plane, the weights of a span.
constexpr int sums_of(int span, int plane) { return 2 * span + plane; }
constexpr int rows_of(int plane) { return 4 + plane; }
constexpr int weights_of(int span) { return 6 + span; }

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

// A block whose sums have been stored, but not added to their group.
template <class K, int R, int P>
struct Stored {
  static constexpr int spans = 32 / K::span;
  const int32_t (*sums)[P][R][W];
  Floats scale[spans], min;
  const float* of_rows;  // sums of the rounded rows

  INLINE void add_to(Floats (&acc)[R]) const {
#pragma GCC unroll 2
    for (int s = 0; s < spans; s++)
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        Ints sum = vector_at<Ints>(sums[s][0][r]);
        if constexpr (P == 2) sum += vector_at<Ints>(sums[s][1][r]) << 8;
        acc[r] = fused(__builtin_convertvector(sum, Floats), scale[s], acc[r]);
      }
    if constexpr (K::mins) {
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) acc[r] = fused(Floats{} + of_rows[r], min, acc[r]);
    }
  }
};

// Unpacks a block to signed bytes, multiplies it with R rows and stores the sums.
template <class K, int R, int P>
INLINE void multiply_block(const uint8_t* block, const char* rows, uint8_t (*weights)[64],
                           int32_t (*sums)[P][R][W]) {
  Bytes w[8];
  unpack<K>(w, block, vector_at<Bytes>);
  const __m512i zero = _mm512_set1_epi8(static_cast<char>(K::zero));
#pragma GCC unroll 8
  for (int v = 0; v < 8; v++)
    _mm512_store_si512(weights[v], K::zero ? _mm512_sub_epi8((__m512i)w[v], zero) : (__m512i)w[v]);
  const auto span = [&](auto s) LAMBDA {
    constexpr int S = decltype(s)::value, line = 32 * P;
    load_tile<weights_of(S)>(weights + S * (K::span / 4), 64);
    clear_tile<sums_of(S, 0)>();
    load_tile<rows_of(0)>(rows + S * K::span, line);
    dot_tiles<sums_of(S, 0), rows_of(0), weights_of(S)>();
    if constexpr (P == 2) {
      clear_tile<sums_of(S, 1)>();
      load_tile<rows_of(1)>(rows + S * K::span + BLOCK, line);
      dot_tiles<sums_of(S, 1), rows_of(1), weights_of(S)>();
    }
    store_tile<sums_of(S, 0)>(sums[S][0], 64);
    if constexpr (P == 2) store_tile<sums_of(S, 1)>(sums[S][1], 64);
  };
  span(Constant<0>());
  if constexpr (K::span == 16) span(Constant<1>());
}

// Computes a panel for R rows. The sums of a block are added while the next block is multiplied.
template <class K, int R, int P>
TARGET __attribute__((noinline)) void panel_by_tiles(const uint8_t* panel, const char* x,
                                                     const TileRows& as, float* totals) {
  constexpr int spans = 32 / K::span;
  alignas(64) uint8_t weights[2][8][64];
  alignas(64) int32_t sums[2][spans][P][R][W];
  const auto* scale = reinterpret_cast<const float*>(x + as.scales_at());
  const auto* of_rows = reinterpret_cast<const float*>(x + as.sums_at());
  const int64_t blocks = as.columns / BLOCK;
  Floats acc[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    acc[r] = Floats{};
    __builtin_memcpy(totals + r * W, &acc[r], sizeof acc[r]);
  }
  Stored<K, R, P> before{};
  int64_t left = blocks;
  int turn = 0;
  const auto add = [&]() LAMBDA {
    before.add_to(acc);
    if (P == 1 || --left == 0) {
      add_group<R>(acc, scale, totals);
      scale += R, left = blocks;
    }
  };
  int of_tile = K::blocks;
  asm("" : "+r"(of_tile));  // otherwise GCC repeats the code of a block for each of two
  for (int64_t done = 0; done < as.k; done += K::blocks * BLOCK, panel += K::bytes) {
    const typename K::Scales scales(panel, 0);
    for (int b = 0; b < of_tile; b++, x += R * BLOCK * P, of_rows += R, turn ^= 1) {
      multiply_block<K, R, P>(panel + K::numbers + b * K::block_bytes, x, weights[turn],
                              sums[turn]);
      if (before.sums) add();
      before.sums = sums[turn], before.of_rows = of_rows;
#pragma GCC unroll 2
      for (int s = 0; s < spans; s++) before.scale[s] = scales.scale(spans * b + s);
      if constexpr (K::mins) before.min = scales.min(b);
    }
  }
  add();
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
    const int64_t lanes = now.end - c < W ? now.end - c : W;
    for (int64_t g = 0; g < as.groups; g++) {
      const auto* const x = static_cast<const char*>(packed) + g * as.bytes();
      if (as.rows == 8)
        panel_by_tiles<K, 8, P>(panel, x, as, totals);
      else if (as.rows == 12)
        panel_by_tiles<K, 12, P>(panel, x, as, totals);
      else
        panel_by_tiles<K, 16, P>(panel, x, as, totals);
      for (int64_t r = 0; r < as.count(g); r++)
        __builtin_memcpy(p.out + (g * as.rows + r) * p.m + c, totals + r * W, 4 * lanes);
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
