// Kernels by level of CPU instructions.
#pragma once
#include "kernels.h"
#include "panels.h"

namespace stree {

// Returns the fastest kernels of this machine up to a level: 0 portable, 1 AVX2, 2 AVX-512,
// 3 AMX.
const Kernels& kernels_of(int64_t level);

// Returns the kernel for a weight [m, k] in float32, for any number of rows.
const ProductKernel& float32_product(int64_t level, int64_t m, int64_t k);

// Returns the kernels for packed weights, by kind.
const PanelProduct* panels_of_level(int64_t level);

}  // namespace stree
