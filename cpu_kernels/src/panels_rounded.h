// Rounding of a product's rows to integers, and sums of groups. Include after panels_kinds.h.

constexpr float MIN_GROUP_MAX = 1e-30f;  // smaller groups are 0; same as in models/weights/panels

// Rounds `count` numbers (at most 256, multiples of 32) to integers up to `most`. Returns the
// scale.
TARGET inline float rounded_group(const float* from, int64_t count, float most, int16_t* q) {
  uint32_t bits = 0;  // of the largest magnitude; infinity and NaN have larger ones
  for (int64_t i = 0; i < count; i++) {
    uint32_t magnitude;
    __builtin_memcpy(&magnitude, from + i, 4);
    magnitude &= 0x7FFFFFFF;
    bits = magnitude > bits ? magnitude : bits;
  }
  float group_max;
  __builtin_memcpy(&group_max, &bits, 4);
  const bool finite = bits < 0x7F800000, is_normal = finite && group_max >= MIN_GROUP_MAX;
  const float inverse = is_normal ? most / group_max : 0.0f;
  // Adding and subtracting 1.5 * 2^23 rounds to nearest, ties to even.
  for (int64_t i = 0; i < count; i++) {
    const float product = is_normal ? from[i] * inverse : 0.0f;
    q[i] = static_cast<int16_t>(static_cast<int32_t>((product + 12582912.0f) - 12582912.0f));
  }
  return is_normal ? group_max / most : finite ? 0.0f : __builtin_nanf("");
}

// Adds the sums of a group to the totals [R][W], and clears them.
template <int R>
INLINE void add_group(Floats (&acc)[R], const float* scales, float* totals) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    const Floats now = fused(acc[r], all(scales[r]), vector_at<Floats>(totals + r * W));
    __builtin_memcpy(totals + r * W, &now, sizeof now);
    acc[r] = Floats{};
  }
  asm volatile("" : : : "memory");  // keep totals out of registers, which the sums need
}

// Writes totals [count][W] to rows that are m numbers apart, the first `left` lanes of each.
TARGET inline void put_totals(const float* totals, int64_t count, int64_t m, int64_t left,
                              float* out) {
  for (int64_t r = 0; r < count; r++, totals += W, out += m) {
    if (left >= W) {
      __builtin_memcpy(out, totals, 4 * W);
    } else {
      for (int64_t i = 0; i < left; i++) out[i] = totals[i];
    }
  }
}
