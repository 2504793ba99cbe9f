// The interface of the kernels of one instruction set.
//
// Letters: B batch, T nodes, Tq queried nodes, H heads, P head size, N state size, G groups,
// M longest path, K taps; t rows of a product, k and m columns and rows of its weight.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define STREE_AMX 1  // the compiler supports AMX instructions
#else
#define STREE_AMX 0
#endif

namespace stree {

// True if weights are prefetched into all caches, false if only into the outer ones. True on AMD
// CPUs from Zen 5 on; for int8 weights and few rows on all AMD CPUs. The measurements are in
// docs/explanation/cpu-kernels.md.
extern const bool into_all_caches, int8_into_all_caches;

// True if a block of one or two rows reads its columns one after another, in the order of
// memory. True on AMD Zen 3 and 4; measured on Zen 4.
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

// `pack` converts the rows once to the form that the instructions need. Then any thread can
// compute any columns of `out`. With small pieces, a thread passes the `next` columns that it
// will compute, and their weights are prefetched.
struct ProductKernel {
  int64_t (*packed_bytes)(const Product&);
  void (*pack)(const Product&, void* packed);
  void (*columns)(const Product&, const void* packed, Columns now, Columns next);
  int64_t together;  // `now` should begin and end at multiples of this
  // Columns per piece; if 0, or if the function is null, a thread takes large parts.
  int64_t (*piece)(const Product&);
};

// Scan inputs of a tree's nodes, [B, capacity, ...]: see pallas_kernels/scan.py.
struct Tokens {
  const void *x, *B;  // float32 or bfloat16
  const float *dt, *a;
  int64_t capacity;  // rows per batch row; the nodes are the first ones
};

struct Scan {
  Tokens past, now;
  const void* C;
  const float* D;
  const float* h0;
  const int32_t *path, *length;
  const int32_t* rows;  // [Tq], rows of the queried nodes; if null, all T are queried
  const uint8_t* mask;  // [B, T, T]
  const int64_t *nodes, *queries;  // [B], numbers of valid nodes and queries
  const int32_t* parents;   // [B, T]; -1 is the committed text
  const int32_t* slot;      // [B, T], where a node's state is kept for its children, or -1
  const int32_t* place;     // [B, Tq], the place of each query when they are sorted by parent
  const int32_t* query;     // [B, Tq], the query at each place
  const int32_t* children;  // [B, T + 2], where those of the committed text and each node begin
  float *y, *h;  // [B, Tq, H, P]; h may be h0
  int64_t batch, H, P, N, G, M, T, Tq, K, slots;
  int64_t reads;      // vectors C of each query, with which the state is multiplied
  bool bf16;          // dtype of B and C: bfloat16 if true, else float32
  bool x_bf16;        // dtype of x
  bool D_by_channel;  // D is [H, P], not [H, 1]
  bool a_by_column;   // log decays are [B, capacity, H, N], not [B, capacity, H]; then G = H
};

// Call `group` for all groups of all batch rows, then `head` for all heads; any thread can take
// any of them. `head` and `next` are indices b * H + head. `next` is the head that the thread
// takes after this one, or -1.
struct ScanKernel {
  int64_t (*shared_bytes)(const Scan&);
  int64_t (*own_bytes)(const Scan&);  // scratch per thread
  void (*group)(const Scan&, void* shared, int64_t b, int64_t g);
  void (*head)(const Scan&, void* shared, void* own, int64_t head, int64_t next);
};

// The query of a node that is the ancestor of a queried node, and of a node that is not needed.
constexpr int32_t UNREAD_NODE = -1, UNUSED_NODE = -2;

// A selective scan of Mamba-1, see pallas_kernels/selective.py.
struct Selective {
  const void *past_x, *x;                // [B, capacity, D], [B, T, D]; float32 or bfloat16
  const float *past_dt, *past_B;         // [B, capacity, D], [B, capacity, N]
  const float *dt, *B, *C, *A, *skip;    // [B, T, D], [B, T, N], [B, Tq, N], [B, N, D], [D]
  const float* h0;                       // [B, N, D]
  const int32_t *path, *length;          // [B, M], [B]
  const int32_t *parents, *query;        // [B, T], see `find_queries`
  float *y, *h;                          // [B, Tq, D], [B, N, D]; h may be h0. If null: no replay
  int64_t batch, capacity, M, T, Tq, N, D;
  bool bf16;   // dtype of x
  bool chain;  // the parent of each token is the one before it
};

// Any thread can take any block of `width` channels from `begin` on.
struct SelectiveKernel {
  int64_t (*own_bytes)(const Selective&);  // scratch per thread
  void (*block)(const Selective&, void* own, int64_t b, int64_t begin);
  int64_t width;
};

// What recurrent mixers share: a convolution along tree paths, a scan and a norm, between two
// projections. The inputs of `scan`, except C, are arrays that the mixer writes. `inputs` are those
// of the convolution.
struct Mixer {
  Scan scan;
  const float* in;  // [B, Tq, width]; z and the convolution's inputs begin at to_z and to_inputs
  int64_t width, to_z, to_inputs, channels;
  const void *conv_weight, *conv_bias;  // [channels, K], [channels] or null
  const void* norm;                     // [H * P], [P] (Delta) or null
  const float *dt_bias, *A_log;         // [H]
  const int32_t* window;                // [B, T, K]
  const void *conv0, *past_inputs;
  void *conv, *x, *B, *inputs;  // may be the arrays of the last tree
  float* a;
  float eps;
  bool weights_bf16;
};

// A Mamba2 mixer, see models/mixers/mamba2.py.
struct Mamba2 : Mixer {
  int64_t to_dt, norm_groups;
  float* dt;
  float least_dt, most_dt;
  bool norm_first;
};

// A Gated DeltaNet mixer, see models/mixers/delta.py. In `scan`, x is u, B the keys, C keys and
// queries in turn, and dt [B, capacity, G] the factors that normalize keys.
struct Delta : Mixer {
  const float* gates;  // [B, Tq, gates_width]: b of each head, then a, or all log decays
  int64_t gates_width;
  float* k_scale;
  float beta_max;  // largest strength of a write
  bool sigmoid;  // of the output's gate; else silu
};

// Call `group` as in ScanKernel, then `head`, then `norm` for all queries, unless it is null.
template <class M>
struct MixerKernel {
  int64_t (*shared_bytes)(const M&);
  int64_t (*own_bytes)(const M&);
  void (*group)(const M&, void* shared, int64_t b, int64_t g);
  void (*head)(const M&, void* shared, void* own, int64_t head, int64_t next);
  void (*norm)(const M&, void* shared, int64_t b, int64_t query);
};

// Attention from Tq queries, in tiles, to T nodes and a cache: pallas_kernels/attention.py.
struct Attention {
  const float* q;                          // [B, Tq, Hq, hd]
  const void *k, *v, *k_cache, *v_cache;   // [B, T, Hk, hd], [B, Hk, S, hd]
  const int32_t* length;                   // [B]
  const uint8_t* mask;                     // [B, Tq, T]
  const int32_t* first;                    // [B, Tq], first visible rows of the cache, or null
  const float* sink;                       // [Hq], scores of keys without values, or null
  const int32_t *ancestors, *count;        // [B, Tq, T], [B, Tq], the nodes that a query sees
  const int64_t *queries, *places;         // [B], valid queries; where the last one's text ends
  float* out;                              // [B, Tq, Hq, hd]
  float* partial;                          // sums of parts that several threads compute
  int64_t batch, Tq, T, Hq, Hk, S, hd, tile, tiles, parts;
  float scale;
};

// Places of the text that one thread sums, see attention_body.h.
constexpr int64_t PART = 1024;

// A unit is a tile of queries of a KV head of a batch row. There are B * Hk * tiles units.
struct AttentionKernel {
  int64_t (*own_bytes)(const Attention&);
  void (*part)(const Attention&, void* own, int64_t unit, int64_t part);
  void (*merge)(const Attention&, int64_t unit);  // after all parts of the unit
  void (*whole)(const Attention&, void* own, int64_t unit);
};

struct Kernels {
  ProductKernel float32, bfloat16, int8;
  ScanKernel scan;
  MixerKernel<Mamba2> mixer;
  MixerKernel<Delta> delta;
  SelectiveKernel selective;
  AttentionKernel attention, attention_bfloat16;
  // out [size] = silu(multiplier * gate) * up; `in` holds gate [size], then up [size].
  void (*gate)(const float* in, int64_t size, float multiplier, float* out);
  // Writes numbers [begin, end) of the Gumbel noise of a key folded with `count` numbers.
  void (*noise)(const uint32_t* key, const int32_t* numbers, int64_t count, int64_t begin,
                int64_t end, float* out);
  // Writes the W largest of `size` scores, their places, and log(sum(exp(scores))).
  void (*best)(const float* scores, int64_t size, int64_t W, float* best, int32_t* place,
               float* total);
  // Divides logits by a temperature and adds noise; temperature 0 is greedy.
  void (*drawn)(const float* logits, int64_t size, float temperature, const float* noise,
                float* scores);
  float (*sum)(const float* x, int64_t size);
};

// Each is in its own file, compiled for its instructions. Call one only on machines that have
// them.
const Kernels& portable();
#if defined(__x86_64__)
const Kernels& avx2();               // AVX2, FMA
const Kernels& avx512();             // AVX-512 F, BW, DQ, VL; without `int8`
const ProductKernel& avx512_bf16();  // AVX512-BF16, for `bfloat16`
const AttentionKernel& avx512_bf16_attention();
const ProductKernel& avx512_vnni();  // AVX512-VNNI, for `int8`
#endif
#if STREE_AMX
const ProductKernel& amx_float32();   // also needs AVX512-BF16; see float32_product
const ProductKernel& amx_bfloat16();  // also needs AVX512-BF16
const ProductKernel& amx_int8();
const AttentionKernel& amx_attention();  // also needs AVX512-BF16; for `attention_bfloat16`
#endif

}  // namespace stree
