// Products with weights that are kept packed in 4 to 8 bits, as they are in a file.
//
// A panel is 16 consecutive rows of a weight [m, k]; rows past m are 0. It is an array
// [k / tile][bytes] of one kind. A tile begins with its scales, one lane per row of the panel.
// Numbers follow, block of 32 columns by block: byte 4 c + i of a vector of 64 bytes belongs to row
// c. models/weights/panels describes every kind.
#pragma once
#include "kernels.h"

namespace stree {

constexpr int64_t PANEL = 16;  // rows of a weight per panel
constexpr int64_t BLOCK = 32;  // columns whose numbers are packed together

struct PanelKind {
  int64_t tile, bytes;  // columns and bytes of a tile of a panel
};

enum : int {
  Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, NVFP4,
  INT4_32, INT4_64, INT4_128, PANEL_KINDS
};

constexpr PanelKind PANEL_KIND[PANEL_KINDS] = {
    {64, 576},   {64, 640},    {64, 704},    {64, 768},    {64, 1088},
    {256, 2304}, {256, 2816},  {256, 3392},  {64, 576},    {256, 2240},
    {128, 1088}, {64, 640},    {32, 384},    {64, 640},    {128, 1152}};

// Columns of a row that are rounded together: the largest multiple of 32 up to 256 that divides k
// with two int8 planes (16 bits), 32 with one plane.
inline constexpr int64_t rounded_columns(int64_t k, int64_t planes) {
  int64_t columns = planes == 2 ? 256 : BLOCK;
  while (k % columns != 0) columns -= BLOCK;
  return columns;
}

// The kernels of a kind with one and with two planes. `Product::weight` holds panels. All
// instruction sets compute the same bits.
struct PanelProduct {
  ProductKernel planes[2];
};

// Each returns kernels by kind.
const PanelProduct* portable_panels();
#if defined(__x86_64__)
const PanelProduct* avx2_panels();         // also needs F16C
const PanelProduct* avx512_vnni_panels();  // AVX-512 F, BW, DQ, VL and VNNI
#endif
#if STREE_AMX
const PanelProduct* amx_panels();  // also needs AVX512-VNNI
#endif

// Writes row `row` of a table of panels, as float32 [k].
void decode_panel_row(int64_t kind, const uint8_t* data, int64_t row, int64_t k, float* out);

}  // namespace stree
