// int8 products with AVX512-VNNI: dot products of four unsigned by four signed bytes, summed in
// int32.
//
// There are two methods. By lanes: a vector holds 64 numbers of one column, and its lanes are
// summed at the end of a group, for each row. By columns: the weights of sixteen columns are
// transposed first; a vector then holds four numbers of each column, and no lanes need to be
// summed. `by_lanes` chooses the faster method.
//
// With both methods, sums over a group are exact integers, and groups are added in order. A
// row's result therefore does not depend on the other rows, bit for bit, and is the same as with
// AMX.
#include "kernels.h"
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET                                                                       \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")))

namespace stree {
namespace {

#include "product_body.h"
#include "avx512_lanes.h"
#include "int8_body.h"

// Not __m512i, which to GCC 12 is eight int64: it would keep every sum twice.
typedef int32_t Ints __attribute__((vector_size(64)));

constexpr int PANEL = 16, LINE = 64;
constexpr int MAX_ROWS = 64;         // rows of a product
constexpr int64_t PART = 512;        // columns of a group whose weights are transposed at once
constexpr int64_t BY_LANES = 20;     // method by lanes: least columns of a group per row
// Rows per block, whose sums are in registers; and most blocks for the method by lanes.
constexpr int ROWS_BY_LANES = 6, ROWS_BY_COLUMNS = 16, BLOCKS_BY_LANES = 3;

// True if the method by lanes is the faster one, which it is for few rows and long groups
// (measured on Zen 5).
TARGET inline bool by_lanes(const Product& p) {
  return p.t <= BLOCKS_BY_LANES * ROWS_BY_LANES && p.t * BY_LANES <= p.k / p.groups;
}

// The rows of a product, quantized per group and padded with 0: q [groups, t, padded] by lanes,
// [groups, padded / 4, t, 4] by columns; scale and begin [groups, t]. The instructions need
// unsigned weights and get w + 128. Sums therefore begin at -128 times the sum of the row.
struct Packed {
  int8_t* buffer;  // [padded]
  int8_t* q;
  float* scale;
  int32_t* begin;
  int64_t size, padded, bytes;

  TARGET Packed(const Product& p, void* packed) {
    size = p.k / p.groups, padded = rounded_up(size, LINE);
    const int64_t count = p.t * p.groups;
    buffer = static_cast<int8_t*>(packed);
    q = buffer + padded;
    bytes = (count + 1) * padded;
    scale = reinterpret_cast<float*>(buffer + bytes);
    bytes += 4 * count;
    begin = reinterpret_cast<int32_t*>(buffer + bytes);
    bytes += 4 * count;
  }
};

TARGET int64_t packed_bytes(const Product& p) { return Packed(p, nullptr).bytes; }

TARGET inline Ints dot(Ints sum, __m512i weight, __m512i row) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, weight, row);
}

TARGET void pack(const Product& p, void* packed) {
  const Packed rows(p, packed);
  const bool lanes = by_lanes(p);
  for (int64_t g = 0; g < p.groups; g++)
    for (int64_t r = 0; r < p.t; r++) {
      const int64_t i = g * p.t + r;
      int8_t* const q = lanes ? rows.q + i * rows.padded : rows.buffer;
      rows.scale[i] = quantized(p.rows + r * p.k + g * rows.size, rows.size, rows.padded, q);
      Ints sum{};
      for (int64_t s = 0; s < rows.padded; s += LINE)
        sum = dot(sum, _mm512_set1_epi8(1), _mm512_load_si512(q + s));
      rows.begin[i] = -128 * _mm512_reduce_add_epi32((__m512i)sum);
      int8_t* const to = rows.q + g * p.t * rows.padded + 4 * r;
      for (int64_t s = 0; !lanes && s < rows.padded; s += 4)
        __builtin_memcpy(to + s * p.t, q + s, 4);
    }
}

// A block of columns with `count` valid ones. Columns past the last valid one repeat it.
struct Some {
  const int8_t* first;
  const float* scale;
  int64_t k, groups;
  int count;

  TARGET Some(const Product& p, int64_t column, int64_t end, int most)
      : first(static_cast<const int8_t*>(p.weight) + column * p.k),
        scale(p.scale + column * p.groups), k(p.k), groups(p.groups),
        count(static_cast<int>(end - column < most ? end - column : most)) {}
  TARGET inline int64_t place(int c) const { return c < count ? c : count - 1; }
  TARGET inline const int8_t* operator[](int c) const { return first + place(c) * k; }
  TARGET inline __mmask16 mask() const { return static_cast<__mmask16>((1u << count) - 1); }
};

TARGET inline __mmask16 up_to(int64_t n) {
  return static_cast<__mmask16>(n < 16 ? (1u << n) - 1 : 0xFFFF);
}

TARGET inline __m512i as_unsigned(__m512i w) {
  return _mm512_xor_si512(w, _mm512_set1_epi8(-128));
}

// Loads the scales of four groups from `group` on, as one vector of columns per group.
TARGET inline void scales_of(__m128 (&of)[COLUMNS], const Some& columns, int64_t group) {
  const auto mask = static_cast<__mmask8>(up_to(columns.groups - group));
  for (int c = 0; c < COLUMNS; c++)
    of[c] = _mm_maskz_loadu_ps(mask, columns.scale + columns.place(c) * columns.groups + group);
  _MM_TRANSPOSE4_PS(of[0], of[1], of[2], of[3]);
}

// Returns a vector whose lane c is the sum of the lanes of sums[c].
TARGET inline __m128i lanes_added(const Ints (&sums)[COLUMNS]) {
  __m512i two[2];
  for (int i = 0; i < 2; i++) {
    const __m512i a = (__m512i)sums[2 * i], b = (__m512i)sums[2 * i + 1];
    two[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  }
  const __m512i four = _mm512_add_epi32(_mm512_unpacklo_epi64(two[0], two[1]),
                                        _mm512_unpackhi_epi64(two[0], two[1]));
  const __m256i half =
      _mm256_add_epi32(_mm512_castsi512_si256(four), _mm512_extracti64x4_epi64(four, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// Computes R rows from `first` on, of four columns.
template <int R>
TARGET void block_by_lanes(const Product& p, const Packed& rows, int64_t first,
                           const Some& columns, float* out, Ahead& from_here) {
  Ahead ahead = from_here;
  __m128 total[R], scales[COLUMNS];
  for (int r = 0; r < R; r++) total[r] = _mm_setzero_ps();
  const int8_t* from[COLUMNS];
  for (int c = 0; c < COLUMNS; c++) from[c] = columns[c];
  for (int64_t g = 0; g < p.groups; g++) {
    const int64_t i = g * p.t + first;
    const int8_t* const x = rows.q + i * rows.padded;
    Ints sum[R][COLUMNS];
    for (int r = 0; r < R; r++)
      for (int c = 0; c < COLUMNS; c++) sum[r][c] = Ints{};
    const auto add = [&](int64_t s, const __m512i (&w)[COLUMNS]) TARGET {
      for (int r = 0; r < R; r++) {
        const __m512i row = _mm512_load_si512(x + r * rows.padded + s);
        for (int c = 0; c < COLUMNS; c++) sum[r][c] = dot(sum[r][c], w[c], row);
      }
    };
    const int64_t whole = rows.size / LINE * LINE, rest = rows.size - whole;
    __m512i w[COLUMNS];
    for (int64_t s = 0; s < whole; s += LINE) {
      ahead.fetch();
      for (int c = 0; c < COLUMNS; c++) w[c] = as_unsigned(_mm512_loadu_si512(from[c] + s));
      add(s, w);
    }
    if (rest) {
      for (int c = 0; c < COLUMNS; c++)
        w[c] = as_unsigned(_mm512_maskz_loadu_epi8((1ull << rest) - 1, from[c] + whole));
      add(whole, w);
    }
    for (int c = 0; c < COLUMNS; c++) from[c] += rows.size;
    if (g % COLUMNS == 0) scales_of(scales, columns, g);
    for (int r = 0; r < R; r++) {
      const __m128i all = _mm_add_epi32(lanes_added(sum[r]), _mm_set1_epi32(rows.begin[i + r]));
      const __m128 factor = _mm_mul_ps(_mm_set1_ps(rows.scale[i + r]), scales[g % COLUMNS]);
      total[r] = _mm_fmadd_ps(_mm_cvtepi32_ps(all), factor, total[r]);
    }
  }
  const auto mask = static_cast<__mmask8>(columns.mask());
  for (int r = 0; r < R; r++) _mm_mask_storeu_ps(out + (first + r) * p.m, mask, total[r]);
  from_here = ahead;
}

#define STREE_UP_TO_16(CASE)                                                              \
  STREE_UP_TO_6(CASE) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14) \
      CASE(15) CASE(16)

// Computes all rows by lanes, four columns at a time.
TARGET void columns_by_lanes(const Product& p, const Packed& rows, Columns now) {
  const int64_t blocks = (p.t + ROWS_BY_LANES - 1) / ROWS_BY_LANES;
  const int64_t steps = blocks * p.groups * rows.padded / LINE;
  const int64_t bytes = (COLUMNS * p.k + steps - 1) / steps;
  for (int64_t c = now.begin; c < now.end; c += COLUMNS) {
    const Some columns(p, c, now.end, COLUMNS);
    const auto* const next = reinterpret_cast<const char*>(columns.first + COLUMNS * p.k);
    Ahead ahead(next, bytes, int8_into_all_caches);
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t first = b * p.t / blocks, last = (b + 1) * p.t / blocks;
      switch (last - first) {
#define STREE_BLOCK(R)                                                    \
  case R:                                                                 \
    block_by_lanes<R>(p, rows, first, columns, p.out + c, ahead);         \
    break;
        STREE_UP_TO_6(STREE_BLOCK)
#undef STREE_BLOCK
      }
    }
  }
}

// Loads the scales of sixteen groups from `group` on, as one vector of columns per group.
TARGET inline void scales_of(__m512 (&of)[PANEL], const Some& panel, int64_t group) {
  const __mmask16 mask = up_to(panel.groups - group);
  for (int c = 0; c < PANEL; c++)
    of[c] = _mm512_maskz_loadu_ps(mask, panel.scale + panel.place(c) * panel.groups + group);
  transpose_block(of);
}

// Loads sixteen numbers of every fourth column from `first` on.
template <bool WHOLE>
TARGET inline __m512i quarters(const Some& panel, int first, int64_t at, __mmask16 mask) {
  __m128i of[4];
  for (int i = 0; i < 4; i++) {
    const int c = 4 * i + first;
    of[i] = WHOLE ? _mm_loadu_epi8(panel.first + c * panel.k + at)
                  : _mm_maskz_loadu_epi8(mask, panel[c] + at);
  }
  __m512i all = _mm512_inserti32x4(_mm512_castsi128_si512(of[0]), of[1], 1);
  all = _mm512_inserti32x4(all, of[2], 2);
  return as_unsigned(_mm512_inserti32x4(all, of[3], 3));
}

// Transposes the weights of a part of a group to vectors with four numbers of each column.
// WHOLE: the panel has all columns and `size` is a multiple of 16, so no masks are needed.
template <bool WHOLE>
TARGET __attribute__((noinline)) void transpose_weights(__m512i* to, const Some& panel, int64_t at,
                                           int64_t size, Ahead& from_here) {
  Ahead ahead = from_here;
  for (int64_t s = 0; s < size; s += 16, to += 4) {
    ahead.fetch();
    const __mmask16 mask = up_to(size - s);
    __m512i x[4];
    for (int c = 0; c < 4; c++) x[c] = quarters<WHOLE>(panel, c, at + s, mask);
    const __m512i low = _mm512_unpacklo_epi32(x[0], x[1]);
    const __m512i high = _mm512_unpackhi_epi32(x[0], x[1]);
    const __m512i more_low = _mm512_unpacklo_epi32(x[2], x[3]);
    const __m512i more_high = _mm512_unpackhi_epi32(x[2], x[3]);
    to[0] = _mm512_unpacklo_epi64(low, more_low);
    to[1] = _mm512_unpackhi_epi64(low, more_low);
    to[2] = _mm512_unpacklo_epi64(high, more_high);
    to[3] = _mm512_unpackhi_epi64(high, more_high);
  }
  from_here = ahead;
}

// Adds the products of R of `t` rows with `steps` vectors of transposed weights. With few rows,
// even and odd steps have separate sums, so that a step need not wait for the one before. Not
// inline: GCC would run out of registers for the sums.
template <int R>
TARGET __attribute__((noinline)) void add_part(Ints* sums, const int8_t* x, int64_t t,
                                               const __m512i* transposed, int64_t steps,
                                               Ahead& from_here) {
  constexpr int OWN = R <= 6 ? 2 : 1;  // sums per row
  Ahead ahead = from_here;
  Ints sum[OWN][R];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    sum[0][r] = sums[r];
    if (OWN > 1) sum[OWN - 1][r] = Ints{};
  }
  for (int64_t s = 0; s < steps; s += 2) {
    ahead.fetch();
#pragma GCC unroll 2
    for (int o = 0; o < 2; o++, x += 4 * t) {
      const __m512i w = transposed[s + o];
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        int32_t four;
        __builtin_memcpy(&four, x + 4 * r, 4);
        sum[o % OWN][r] = dot(sum[o % OWN][r], w, _mm512_set1_epi32(four));
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) sums[r] = OWN > 1 ? sum[0][r] + sum[OWN - 1][r] : sum[0][r];
  from_here = ahead;
}

// Computes the sums [t] over a group, by columns.
TARGET void group_by_columns(Ints* sums, const Product& p, const Packed& rows, int64_t g,
                             const Some& panel, Ahead& ahead) {
  __m512i transposed[PART / 4];
  const int64_t blocks = (p.t + ROWS_BY_COLUMNS - 1) / ROWS_BY_COLUMNS;
  for (int64_t r = 0; r < p.t; r++) sums[r] = Ints{} + rows.begin[g * p.t + r];
  for (int64_t from = 0; from < rows.size; from += PART) {
    const int64_t size = rows.size - from < PART ? rows.size - from : PART;
    if (panel.count == PANEL && size % 16 == 0)
      transpose_weights<true>(transposed, panel, g * rows.size + from, size, ahead);
    else
      transpose_weights<false>(transposed, panel, g * rows.size + from, size, ahead);
    const int64_t steps = rounded_up(size, 8) / 4;
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t first = b * p.t / blocks, last = (b + 1) * p.t / blocks;
      const int8_t* const x = rows.q + (g * rows.padded + from) * p.t + 4 * first;
      switch (last - first) {
#define STREE_ADD(R)                                              \
  case R:                                                         \
    add_part<R>(sums + first, x, p.t, transposed, steps, ahead);  \
    break;
        STREE_UP_TO_16(STREE_ADD)
#undef STREE_ADD
      }
    }
  }
}

// Computes all rows of sixteen columns, with transposed weights.
TARGET void panel_by_columns(const Product& p, const Packed& rows, const Some& panel, float* out,
                             Ahead ahead) {
  Ints sums[MAX_ROWS];
  __m512 total[MAX_ROWS], scales[PANEL];
  for (int64_t r = 0; r < p.t; r++) total[r] = _mm512_setzero_ps();
  for (int64_t g = 0; g < p.groups; g++) {
    if (g % PANEL == 0) scales_of(scales, panel, g);
    group_by_columns(sums, p, rows, g, panel, ahead);
    const float* const row_scale = rows.scale + g * p.t;
    for (int64_t r = 0; r < p.t; r++) {
      const __m512 factor = _mm512_mul_ps(_mm512_set1_ps(row_scale[r]), scales[g % PANEL]);
      total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps((__m512i)sums[r]), factor, total[r]);
    }
  }
  for (int64_t r = 0; r < p.t; r++)
    _mm512_mask_storeu_ps(out + r * p.m, panel.mask(), total[r]);
}

TARGET void columns(const Product& p, const void* packed, Columns now, Columns next) {
  const Packed rows(p, const_cast<void*>(packed));  // only read
  if (by_lanes(p)) return columns_by_lanes(p, rows, now);
  const int64_t blocks = (p.t + ROWS_BY_COLUMNS - 1) / ROWS_BY_COLUMNS;
  const int64_t steps = p.groups * rows.padded / LINE * (4 + 8 * blocks);
  const int64_t bytes = (PANEL * p.k + steps - 1) / steps;
  const auto* const weight = static_cast<const char*>(p.weight);
  for (int64_t c = now.begin; c < now.end; c += PANEL) {
    const int64_t after = c + PANEL < now.end ? c + PANEL : next.begin;
    const Ahead ahead(weight + after * p.k, after < p.m ? bytes : 0, into_all_caches);
    panel_by_columns(p, rows, Some(p, c, now.end, PANEL), p.out + c, ahead);
  }
}

// By columns, pieces are single panels; a thread prefetches the next piece that it will take.
TARGET int64_t piece(const Product& p) { return by_lanes(p) ? 0 : PANEL; }

}  // namespace

const ProductKernel& avx512_vnni() {
  static constexpr ProductKernel kernel = {packed_bytes, pack, columns, PANEL, piece};
  return kernel;
}

}  // namespace stree
#endif
