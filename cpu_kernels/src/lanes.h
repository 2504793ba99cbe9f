// Vector functions for one instruction set, written with the vector types of GCC and Clang.
// Include after Float32 and Bfloat16. Lanes past the end of a row are 0.

struct Lanes {
  static constexpr int W = Float32::step;
  typedef Float32::Loaded F;
  typedef int32_t I __attribute__((vector_size(4 * W)));
  typedef uint32_t U __attribute__((vector_size(4 * W)));
  typedef uint16_t H __attribute__((vector_size(2 * W)));

  TARGET static inline F load(const float* from, int64_t count) {
    return count >= W ? Float32::weight(from) : Float32::weight_tail(from, count);
  }
  TARGET static inline F load(const uint16_t* from, int64_t count) {
    return count >= W ? Bfloat16::weight(from) : Bfloat16::weight_tail(from, count);
  }
  TARGET static inline void store(float* to, F x, int64_t count) {
    count >= W ? Float32::put(to, x) : Float32::put_tail(to, x, count);
  }
  TARGET static inline void store(uint16_t* to, F x, int64_t count) {
    const U words = rounded_bits(x) >> 16;
    const H halves = __builtin_convertvector(words, H);
    if (count >= W) {
      __builtin_memcpy(to, &halves, sizeof halves);
    } else {
      for (int i = 0; i < count; i++) to[i] = halves[i];
    }
  }
  // Returns words whose upper 16 bits are those of bfloat16_of; the lower bits are arbitrary.
  TARGET static inline U rounded_bits(F x) {
    const U bits = (U)x, rounded = bits + 0x7FFF + ((bits >> 16) & 1);
    return (I)(bits & 0x7FFFFFFF) > 0x7F800000 ? bits | 0x400000 : rounded;
  }
  TARGET static inline F rounded(F x, const uint16_t*) {
    return (F)(rounded_bits(x) & 0xFFFF0000u);
  }
  TARGET static inline F rounded(F x, const float*) { return x; }

  // Returns numbers k, k + 4, ... of four consecutive vectors.
  TARGET static inline F every_fourth(const F (&x)[4], int k) {
#if defined(__clang__)  // Clang compiles this loop to shuffles, GCC does not
    F y;
    for (int i = 0; i < W; i++) y[i] = x[4 * i / W][(4 * i + k) % W];
    return y;
#else
    I at, half;
    for (int i = 0; i < W; i++) at[i] = (4 * i + k) % (2 * W), half[i] = i < W / 2 ? i : W + i;
    return __builtin_shuffle(__builtin_shuffle(x[0], x[1], at),
                             __builtin_shuffle(x[2], x[3], at), half);
#endif
  }
  TARGET static inline float sum(F x) {
    float lanes[W];
    Float32::put(lanes, x);
    for (int half = W / 2; half; half /= 2)
      for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
  }

  // Accurate to 2 units in the last place. Results below 2^-126 may be 0.
  TARGET static inline F exp(F x) {
    const F low = F{} - 110.0f, high = F{} + 100.0f;
    F bounded = x < low ? low : x;
    bounded = bounded > high ? high : bounded;
    const F shifted = fma(bounded, 1.44269504f, F{} + 12582912.0f);  // 1.5 * 2^23
    const F n = shifted - 12582912.0f;
    const F r = fma(n, 2.12194440e-4f, fma(n, -0.693359375f, bounded));
    F y = fma(r, 1.9875691500e-4f, F{} + 1.3981999507e-3f);  // as Cephes' expf
    y = fma(y, r, F{} + 8.3334519073e-3f);
    y = fma(y, r, F{} + 4.1665795894e-2f);
    y = fma(y, r, F{} + 1.6666665459e-1f);
    y = fma(y, r, F{} + 5.0000001201e-1f);
    y = fma(y, r * r, r) + 1.0f;
    const I power = (I)shifted - 0x4B400000, half = power >> 1;  // n, as integers
    const I first = (half + 127) << 23, second = (power - half + 127) << 23;
    return y * (F)first * (F)second;  // 2^n as two factors, both normal numbers
  }
  TARGET static inline F fma(F a, F b, F c) { return Float32::dot(c, a, b); }
  TARGET static inline F fma(F a, float b, F c) { return fma(a, F{} + b, c); }

  // Accurate to 2 units in the last place for positive normal numbers; as Cephes' logf.
  TARGET static inline F log(F x) {
    const I bits = (I)x;
    const F half = (F)((bits & 0x007FFFFF) | 0x3F000000);  // [0.5, 1)
    const I low = half < F{} + 0.707106781f;               // -1 where it is
    const F e = __builtin_convertvector((bits >> 23) - 126 + low, F);
    const F m = half - 1.0f + (F)((I)half & low);
    F y = fma(m, 7.0376836292e-2f, F{} - 1.1514610310e-1f);
    y = fma(y, m, F{} + 1.1676998740e-1f);
    y = fma(y, m, F{} - 1.2420140846e-1f);
    y = fma(y, m, F{} + 1.4249322787e-1f);
    y = fma(y, m, F{} - 1.6668057665e-1f);
    y = fma(y, m, F{} + 2.0000714765e-1f);
    y = fma(y, m, F{} - 2.4999993993e-1f);
    y = fma(y, m, F{} + 3.3333331174e-1f);
    const F square = m * m;
    y = fma(e, -2.12194440e-4f, y * m * square);
    y = fma(square, -0.5f, y);
    return fma(e, 0.693359375f, m + y);
  }

  TARGET static inline F silu(F x) { return x / (exp(-x) + 1.0f); }

  // Computes log(1 + u) for u in [0, 1], accurate to 3 units in the last place.
  TARGET static inline F log1p(F u) {
    const F s = u / (u + 2.0f), s2 = s * s;  // 2 artanh s; s is at most 1/3
    F y = fma(s2, 1.0f / 15.0f, F{} + 1.0f / 13.0f);
    y = fma(y, s2, F{} + 1.0f / 11.0f);
    y = fma(y, s2, F{} + 1.0f / 9.0f);
    y = fma(y, s2, F{} + 1.0f / 7.0f);
    y = fma(y, s2, F{} + 1.0f / 5.0f);
    y = fma(y, s2, F{} + 1.0f / 3.0f);
    return fma(y, s * s2, s) * 2.0f;
  }
  TARGET static inline F softplus(F x) {
    const F zero = F{};
    return (x > zero ? x : zero) + log1p(exp(x < zero ? x : -x));
  }
};

TARGET inline float exp_of(float x) { return Lanes::exp(Lanes::F{} + x)[0]; }
