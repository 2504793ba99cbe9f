// Functions shared by the files about trees.
#pragma once
#include <algorithm>

#include "handler.h"

namespace stree {

// Finds the places of the `wanted` largest values, the first of equal ones first. If there are
// fewer values, the remaining places are -1. Values must be at least 0.
inline void best_places(const float* value, int64_t count, int64_t wanted, int32_t* places) {
  auto* const left = static_cast<float*>(scratch_of_thread<0>(count * sizeof(float)));
  std::copy_n(value, count, left);
  for (int64_t n = 0; n < wanted; n++) {
    const auto best = n < count ? std::max_element(left, left + count) : left + count;
    places[n] = n < count ? static_cast<int32_t>(best - left) : -1;
    if (n < count) *best = -1;
  }
}

}  // namespace stree
