// What the kernels of one instruction set take and give.
//
// Letters as in docs/design.md: T rows or nodes, B batch, H heads, P head size, N state
// size, G groups; k and m are a weight's columns and rows.
#pragma once
#include <cstddef>
#include <cstdint>

namespace stree {

// out [t, m] = rows [t, k] times weight [m, k] transposed.
struct Product {
  const float* rows;
  const void* weight;
  const float* scale;  // int8 only: [m, groups], of k / groups columns each
  float* out;
  int64_t t, k, m, groups;
};

// Rows are packed once, as the instructions want them; then any columns of `out` can be
// computed by any thread.
struct ProductKernel {
  int64_t (*packed_bytes)(const Product&);
  void (*pack)(const Product&, void* packed);
  void (*columns)(const Product&, const void* packed, int64_t begin, int64_t end);
};

// Inputs of tokens, [B, tokens, ...]: see pallas_kernels/scan.py.
struct Tokens {
  const void *x, *B;  // float32 or bfloat16
  const float *dt, *a;
  int64_t count;
};

struct Scan {
  Tokens past, now;
  const void* C;
  const float* D;
  const float* h0;
  const int32_t *path, *length;
  const uint8_t* mask;
  float *y, *h;  // h may be h0
  int64_t B, H, P, N, G, M;
  bool bf16;          // of x, B and C
  bool D_by_channel;  // D is [H, P], not [H, 1]
};

struct ScanKernel {
  int64_t (*scratch_bytes)(const Scan&);
  void (*heads)(const Scan&, void* scratch, int64_t begin, int64_t end);  // of B * H
};

struct Kernels {
  ProductKernel float32, bfloat16, int8;
  ScanKernel scan;
};

// Each in a file of its own, compiled for its instructions; called only where the
// machine has them.
const Kernels& portable();
#if defined(__x86_64__)
const Kernels& avx2();               // AVX2, FMA
const Kernels& avx512();             // AVX-512 F, BW, DQ, VL; no `int8`
const ProductKernel& avx512_bf16();  // AVX512-BF16, for `bfloat16`
const ProductKernel& avx512_vnni();  // AVX512-VNNI, for `int8`
#endif

}  // namespace stree
