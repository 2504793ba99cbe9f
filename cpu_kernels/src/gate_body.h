// silu(multiplier * gate) * up, for rows that hold gate and up. Include after lanes.h.

TARGET inline void gate_row(const float* in, int64_t size, float multiplier, float* out) {
  using V = Lanes;
  for (int64_t i = 0; i < size; i += V::W) {
    const auto gate = V::load(in + i, size - i) * multiplier;
    V::store(out + i, V::silu(gate) * V::load(in + size + i, size - i), size - i);
  }
}
