// Gumbel noise, and the largest of many scores. Include after lanes.h.

// Computes the two random words of Threefry-2x32 with 20 rounds, as
// stree_jax/sampling/threefry.py does.
template <class U>
TARGET inline void threefry(uint32_t first, uint32_t second, U& a, U& b) {
  constexpr int distances[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t words[3] = {first, second, first ^ second ^ 0x1BD11BDAu};
  a = a + words[0], b = b + words[1];
#pragma GCC unroll 5
  for (uint32_t group = 0; group < 5; group++) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const int distance = distances[group % 2][i];
      a = a + b;
      b = (b << distance) | (b >> (32 - distance));
      b = b ^ a;
    }
    a = a + words[(group + 1) % 3];
    b = b + (words[(group + 2) % 3] + group + 1);
  }
}

TARGET inline void fold_in(uint32_t (&key)[2], int32_t number) {
  uint32_t a = 0, b = static_cast<uint32_t>(number);
  threefry(key[0], key[1], a, b);
  key[0] = a, key[1] = b;
}

// Writes numbers [begin, end) of the Gumbel noise of a key.
TARGET inline void gumbel(const uint32_t (&key)[2], int64_t begin, int64_t end,
                          float* out) {
  using V = Lanes;
  V::U place;
  for (int i = 0; i < V::W; i++) place[i] = static_cast<uint32_t>(i);
  const V::F tiny = V::F{} + 1.17549435e-38f;
  for (int64_t i = begin; i < end; i += V::W) {
    V::U a{}, b = place + static_cast<uint32_t>(i);
    threefry(key[0], key[1], a, b);
    const V::U bits = ((a ^ b) >> 9) | 0x3F800000u;  // bits of a float in [1, 2)
    V::F uniform = ((V::F)bits - 1.0f) + tiny;
    uniform = uniform > tiny ? uniform : tiny;
    V::store(out + i, -V::log(-V::log(uniform)), end - i);
  }
}

TARGET inline void noise_row(const uint32_t* key, const int32_t* numbers, int64_t count,
                             int64_t begin, int64_t end, float* out) {
  uint32_t own[2] = {key[0], key[1]};
  for (int64_t i = 0; i < count; i++) fold_in(own, numbers[i]);
  gumbel(own, begin, end, out);
}

TARGET inline bool any(const Lanes::I& marks) {
  int32_t found = 0;
  for (int i = 0; i < Lanes::W; i++) found |= marks[i];
  return found != 0;
}

// `best_row` for scores that contain NaN. NaN counts as larger than all numbers, as in
// jnp.argmax and lax.top_k.
TARGET inline void best_row_with_nan(const float* scores, int64_t size, int64_t W,
                                     float* best, int32_t* place, float* total) {
  const auto above = [](float x, float y) { return x > y || (x != x && y == y); };
  int64_t found = 0;
  for (int64_t i = 0; i < size; i++) {
    const float x = scores[i];
    if (found == W && !above(x, best[W - 1])) continue;
    int64_t at = found < W ? found++ : W - 1;
    for (; at > 0 && above(x, best[at - 1]); at--)
      best[at] = best[at - 1], place[at] = place[at - 1];
    best[at] = x, place[at] = static_cast<int32_t>(i);
  }
  *total = __builtin_nanf("");
}

// Finds the W largest of `size` scores and their places, largest first, the first of equal ones
// first; and computes the logarithm of the sum of all exponentials.
TARGET inline void best_row(const float* scores, int64_t size, int64_t W, float* best,
                            int32_t* place, float* total) {
  using V = Lanes;
  constexpr float LOWEST = -__builtin_inff();
  V::F top = V::F{} + LOWEST;
  V::I nan{};
  for (int64_t i = 0; i < size; i += V::W) {
    if (size - i < V::W) {  // V::load would fill lanes past the end with 0
      for (int64_t j = i; j < size; j++) {
        top[0] = scores[j] > top[0] ? scores[j] : top[0];
        if (scores[j] != scores[j]) nan[0] = -1;
      }
      break;
    }
    const V::F z = V::load(scores + i, V::W);
    top = z > top ? z : top;
    nan |= z != z;
  }
  if (any(nan)) return best_row_with_nan(scores, size, W, best, place, total);
  float most = LOWEST;
  for (int i = 0; i < V::W; i++) most = top[i] > most ? top[i] : most;
  const float from = most > LOWEST ? most : 0.0f;
  V::F sums = V::F{};
  int64_t found = 0;
  for (int64_t i = 0; i < size; i += V::W) {
    const int64_t count = size - i < V::W ? size - i : V::W;
    V::F z = V::load(scores + i, count);
    for (int64_t j = count; j < V::W; j++) z[j] = LOWEST;
    sums += V::exp(z - from);
    const float least = found < W ? LOWEST : best[W - 1];
    bool better = found < W;
    const V::I higher = z > V::F{} + least;
    for (int j = 0; j < V::W; j++) better |= higher[j] != 0;
    if (!better) continue;
    for (int64_t j = 0; j < count; j++) {
      const float x = scores[i + j];
      if (found == W && !(x > best[W - 1])) continue;
      int64_t at = found < W ? found++ : W - 1;
      for (; at > 0 && x > best[at - 1]; at--) best[at] = best[at - 1], place[at] = place[at - 1];
      best[at] = x, place[at] = static_cast<int32_t>(i + j);
    }
  }
  const bool finite = most > LOWEST && most < -LOWEST;
  *total = finite ? V::log(V::F{} + V::sum(sums))[0] + from : most;
}

// Computes (logits - max) / temperature + noise. Temperature 0 is greedy: no division and no
// noise. A single NaN makes all scores NaN, because in JAX it makes the maximum NaN.
TARGET inline void drawn_row(const float* logits, int64_t size, float temperature,
                             const float* noise, float* scores) {
  using V = Lanes;
  constexpr float LOWEST = -__builtin_inff();
  V::F top = V::F{} + LOWEST;
  V::I nan{};
  int64_t i = 0;
  for (; i + V::W <= size; i += V::W) {
    const V::F z = V::load(logits + i, V::W);
    top = z > top ? z : top;
    nan |= z != z;
  }
  for (; i < size; i++) {
    top[0] = logits[i] > top[0] ? logits[i] : top[0];
    if (logits[i] != logits[i]) nan[0] = -1;
  }
  float most = LOWEST;
  for (int lane = 0; lane < V::W; lane++) most = top[lane] > most ? top[lane] : most;
  if (any(nan)) most = __builtin_nanf("");
  const bool greedy = temperature == 0.0f;
  const float scale = greedy ? 1.0f : 1.0f / temperature;
  for (i = 0; i < size; i += V::W) {
    V::F z = (V::load(logits + i, size - i) - most) * scale;
    if (!greedy) z += V::load(noise + i, size - i);
    V::store(scores + i, z, size - i);
  }
}

// Returns the sum of a row, in an order that depends on its size alone.
TARGET inline float sum_row(const float* x, int64_t size) {
  using V = Lanes;
  V::F sum = V::F{};
  for (int64_t i = 0; i < size; i += V::W) sum += V::load(x + i, size - i);
  return V::sum(sum);
}
