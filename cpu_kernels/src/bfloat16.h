// Conversions between bfloat16 and float. Include inside a namespace with TARGET defined.

// Rounds a float to bfloat16, to nearest, ties to even. NaN stays NaN.
TARGET inline uint16_t bfloat16_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? nan : rounded);
}

TARGET inline float widened(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  __builtin_memcpy(&result, &bits, 4);
  return result;
}
