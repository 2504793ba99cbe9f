// Instantiates all kernels of one instruction set, and the function LEVEL that returns them.
// Include after Float32, Bfloat16 and `int8_products`. Closes the namespaces of the including
// file.

// Transposes a square of numbers.
template <class V, int N>
TARGET inline void transpose_block(V (&x)[N]) {
  float numbers[N][N];
  for (int i = 0; i < N; i++)
    for (int j = 0; j < N; j++) numbers[j][i] = x[i][j];
  for (int i = 0; i < N; i++) x[i] = Float32::row(numbers[i]);
}

#include "lanes.h"
#include "layout.h"
#include "scan_body.h"
#include "conv_body.h"
#include "mixer_body.h"
#include "delta_body.h"
#include "selective_body.h"
#include "attention_body.h"
#include "gate_body.h"
#include "noise_body.h"

}  // namespace

const Kernels& LEVEL() {
  static constexpr Kernels kernels{product_kernel<Float32>(),
                                   product_kernel<Bfloat16>(),
                                   int8_products,
                                   scan_kernel<Float32>(),
                                   mixer_kernel<Float32>(),
                                   delta_kernel<Float32>(),
                                   selective_kernel(),
                                   attention_kernel<Float32>(),
                                   attention_kernel<Bfloat16>(),
                                   gate_row,
                                   noise_row,
                                   best_row,
                                   drawn_row,
                                   sum_row};
  return kernels;
}

}  // namespace stree
