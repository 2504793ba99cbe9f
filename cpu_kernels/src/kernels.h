// What the kernels of one instruction set take and give.
//
// Letters as in docs/explanation/design.md: T rows or nodes, B batch, H heads, P head
// size, N state size, G groups; k and m are a weight's columns and rows.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define STREE_AMX 1  // the compiler knows its instructions
#else
#define STREE_AMX 0
#endif

namespace stree {

// Whether weights are fetched into all caches, not into the outer ones alone: on AMD's CPUs from
// Zen 5 on, and int8's of few rows on older ones, too. (bench/RESULTS-KERNELS.md has the times.)
extern const bool into_all_caches, int8_into_all_caches;

// Whether a block of one or two rows reads its columns one after another, as memory has them:
// on AMD's family of Zen 3 and 4; measured on Zen 4.
extern const bool columns_in_order;

// out [t, m] = rows [t, k] times weight [m, k] transposed.
struct Product {
  const float* rows;
  const void* weight;
  const float* scale;  // int8 only: [m, groups], of k / groups columns each
  float* out;
  int64_t t, k, m, groups;
};

struct Columns {
  int64_t begin, end;
};

// Rows are packed once, as the instructions want them; then any columns of `out` can be
// computed by any thread. One that takes small pieces says what it takes next: those weights are
// fetched.
struct ProductKernel {
  int64_t (*packed_bytes)(const Product&);
  void (*pack)(const Product&, void* packed);
  void (*columns)(const Product&, const void* packed, Columns now, Columns next);
  int64_t together;  // columns that `columns` likes to begin and end at
  int64_t (*piece)(const Product&);  // of so many columns; 0, or null: large parts
};

// Inputs of tokens, [B, room, ...]: see pallas_kernels/scan.py.
struct Tokens {
  const void *x, *B;  // float32 or bfloat16
  const float *dt, *a;
  int64_t room;  // a tree's nodes are the first ones, and may be fewer
};

struct Scan {
  Tokens past, now;
  const void* C;
  const float* D;
  const float* h0;
  const int32_t *path, *length;
  const int32_t* rows;  // [Tq], the queried nodes; null: all T
  const uint8_t* mask;      // [B, T, T]
  const int64_t *nodes, *queries;  // [B]: behind so many there are none
  float *y, *h;  // [B, Tq, H, P]; h may be h0
  int64_t batch, H, P, N, G, M, T, Tq, K;
  bool bf16;          // of x, B and C
  bool D_by_channel;  // D is [H, P], not [H, 1]
};

// Groups of a row of the batch first, then its heads; any thread can do any. Heads are counted
// over all rows, b * H + head; after one its thread does the `next`, or -1: none.
struct ScanKernel {
  int64_t (*shared_bytes)(const Scan&);
  int64_t (*own_bytes)(const Scan&);  // of a thread
  void (*group)(const Scan&, void* shared, int64_t b, int64_t g);
  void (*head)(const Scan&, void* shared, void* own, int64_t head, int64_t next);
};

// A Mamba2 mixer between its projections: models/mixers/mamba2.py. `scan` reads what the
// mixer writes, but for its C.
struct Mixer {
  Scan scan;
  const float* in;  // [B, Tq, width], of which z, xBC and dt begin at `to_`
  int64_t width, to_z, to_xBC, to_dt, channels;
  const void *conv_weight, *conv_bias;  // [channels, K], [channels] or null
  const void* norm;                     // [H * P] or null
  const float *dt_bias, *A_log;
  const int32_t* window;       // [B, T, K]
  const void *conv0, *past_xBC;
  void *conv, *x, *B, *xBC;    // may be the last tree's
  float *dt, *a;
  float eps, least_dt, most_dt;
  int64_t norm_groups;
  bool norm_first, weights_bf16;
};

struct MixerKernel {
  int64_t (*shared_bytes)(const Mixer&);
  int64_t (*own_bytes)(const Mixer&);
  void (*group)(const Mixer&, void* shared, int64_t b, int64_t g);
  void (*head)(const Mixer&, void* shared, void* own, int64_t head, int64_t next);
  void (*norm)(const Mixer&, void* shared, int64_t b, int64_t query);
};

// Attention of Tq queries, in tiles, to T nodes and a cache: pallas_kernels/attention.py.
struct Attention {
  const float* q;                          // [B, Tq, Hq, hd]
  const void *k, *v, *k_cache, *v_cache;   // [B, T, Hk, hd], [B, Hk, S, hd]
  const int32_t* length;                   // [B]
  const uint8_t* mask;                     // [B, Tq, T]
  const int64_t* queries;                  // [B]: behind so many there are none
  float* out;                              // [B, Tq, Hq, hd]
  float* partial;                          // for parts that several threads do
  int64_t batch, Tq, T, Hq, Hk, S, hd, tile, tiles, splits;
  float scale;
};

// Rows of a part of a cache of so many; at most MOST_SPLITS parts.
constexpr int64_t LEAST_SPLIT = 1024, MOST_SPLITS = 16;
inline constexpr int64_t split_rows(int64_t length) {
  const int64_t each = (length + MOST_SPLITS - 1) / MOST_SPLITS, whole = (each + 63) / 64 * 64;
  return whole < LEAST_SPLIT ? LEAST_SPLIT : whole;
}
inline constexpr int64_t split_count(int64_t length) {
  return (length + split_rows(length) - 1) / split_rows(length);
}

// A unit is a tile of queries of a head of keys of a row: B * Hk * tiles.
struct AttentionKernel {
  int64_t (*own_bytes)(const Attention&);
  void (*part)(const Attention&, void* own, int64_t unit, int64_t part);
  void (*merge)(const Attention&, int64_t unit);  // after all its parts
  void (*whole)(const Attention&, void* own, int64_t unit);
};

struct Kernels {
  ProductKernel float32, bfloat16, int8;
  ScanKernel scan;
  MixerKernel mixer;
  AttentionKernel attention, attention_bfloat16;
  // out [size] = silu(multiplier * gate) * up, of gate and up one after the other.
  void (*gate)(const float* in, int64_t size, float multiplier, float* out);
  // Numbers [begin, end) of the noise of a key that is folded with `count` numbers.
  void (*noise)(const uint32_t* key, const int32_t* numbers, int64_t count, int64_t begin,
                int64_t end, float* out);
  // The W largest of `size` scores, their places, log sum exp.
  void (*best)(const float* scores, int64_t size, int64_t W, float* best, int32_t* place,
               float* total);
  // Logits by a temperature, 0 for none, and noise.
  void (*drawn)(const float* logits, int64_t size, float temperature, const float* noise,
                float* scores);
};

// Each in a file of its own, compiled for its instructions; called only where the
// machine has them.
const Kernels& portable();
#if defined(__x86_64__)
const Kernels& avx2();               // AVX2, FMA
const Kernels& avx512();             // AVX-512 F, BW, DQ, VL; no `int8`
const ProductKernel& avx512_bf16();  // AVX512-BF16, for `bfloat16`
const AttentionKernel& avx512_bf16_attention();
const ProductKernel& avx512_vnni();  // AVX512-VNNI, for `int8`
#endif
#if STREE_AMX
const ProductKernel& amx_float32();   // with AVX512-BF16; see float32_product
const ProductKernel& amx_bfloat16();  // with AVX512-BF16
const ProductKernel& amx_int8();
#endif

}  // namespace stree
