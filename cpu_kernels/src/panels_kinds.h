// The kinds of panels: how a tile's numbers and scales are read, W lanes (rows of the weight) at a
// time. Include after the vectors of an instruction set: Bytes (4 W bytes, as uint16), Ints and
// Floats (W each), and `halves`, `unsigned_bytes`, `signed_bytes`, `looked_up`.

#define INLINE TARGET inline __attribute__((always_inline))
#define LAMBDA TARGET __attribute__((always_inline))

template <class V>
INLINE V vector_at(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

INLINE Floats all(float x) { return x - Floats{}; }  // not + 0, which changes -0

template <int KIND, int BITS, int ZERO, int SPAN = 32>
struct Kind {
  static constexpr int kind = KIND, bits = BITS;
  static constexpr int zero = ZERO;  // a value is a number minus this
  static constexpr int span = SPAN;  // columns per scale, within a block
  static constexpr int blocks = PANEL_KIND[KIND].tile / BLOCK, block_bytes = 64 * BITS;
  static constexpr int bytes = PANEL_KIND[KIND].bytes;
  static constexpr int numbers = bytes - blocks * block_bytes;  // offset of the first block
  static constexpr bool mins = false;
  INLINE static Bytes value(Bytes numbers) { return numbers; }
};

// float16 scales [spans][16], then minima if there are any. `lane` is the first of W lanes.
struct HalfScales {
  const uint8_t* tile;
  int lane;
  INLINE HalfScales(const uint8_t* tile, int lane) : tile(tile), lane(lane) {}
  INLINE Floats scale(int i) const { return halves(tile + 2 * (16 * i + lane)); }
  INLINE Floats min(int i) const { return scale(i + 2); }
};

// Scales and minima of six bits, eight each in twelve bytes [12][16], then d and dmin.
struct SixBitScales {
  alignas(64) uint8_t six[2][8][16];
  Floats d, negative_dmin;
  int lane;
  INLINE SixBitScales(const uint8_t* tile, int lane)
      : d(halves(tile + 192 + 2 * lane)), negative_dmin(-halves(tile + 224 + 2 * lane)),
        lane(lane) {
    uint8_t* const to = six[0][0];
    for (int i = 0; i < 64; i += 4 * W) {
      const Bytes a = vector_at<Bytes>(tile + i), b = vector_at<Bytes>(tile + 64 + i);
      const Bytes c = vector_at<Bytes>(tile + 128 + i);
      put(to + i, a & 0x3F3F);
      put(to + 64 + i, (c & 0x0F0F) | ((a >> 2) & 0x3030));
      put(to + 128 + i, b & 0x3F3F);
      put(to + 192 + i, ((c >> 4) & 0x0F0F) | ((b >> 2) & 0x3030));
    }
  }
  INLINE static void put(uint8_t* to, Bytes bytes) { __builtin_memcpy(to, &bytes, sizeof bytes); }
  INLINE Floats scale(int i) const { return d * unsigned_bytes(six[0][i] + lane); }
  INLINE Floats min(int i) const { return negative_dmin * unsigned_bytes(six[1][i] + lane); }
};

struct Q4_0Kind : Kind<Q4_0, 4, 8> {
  using Scales = HalfScales;
};
struct Q5_0Kind : Kind<Q5_0, 5, 16> {
  using Scales = HalfScales;
};
struct Q8_0Kind : Kind<Q8_0, 8, 128> {
  using Scales = HalfScales;
};
struct Q4_1Kind : Kind<Q4_1, 4, 0> {
  using Scales = HalfScales;
  static constexpr bool mins = true;
};
struct Q5_1Kind : Kind<Q5_1, 5, 0> {
  using Scales = HalfScales;
  static constexpr bool mins = true;
};
struct Q4_KKind : Kind<Q4_K, 4, 0> {
  using Scales = SixBitScales;
  static constexpr bool mins = true;
};
struct Q5_KKind : Kind<Q5_K, 5, 0> {
  using Scales = SixBitScales;
  static constexpr bool mins = true;
};

struct Q6_KKind : Kind<Q6_K, 6, 32, 16> {
  struct Scales {
    const uint8_t* by_span;
    Floats d;
    INLINE Scales(const uint8_t* tile, int lane)
        : by_span(tile + 64 + lane), d(vector_at<Floats>(tile + 4 * lane)) {}
    INLINE Floats scale(int i) const { return d * signed_bytes(by_span + 16 * i); }
  };
};

alignas(16) constexpr uint8_t IQ4_VALUES[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                129, 141, 153, 166, 181, 197, 217, 241};
// Twice the numbers of E2M1, plus 12.
alignas(16) constexpr uint8_t E2M1_VALUES[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                 12, 11, 10, 9,  8,  6,  4,  0};

struct IQ4_NLKind : Kind<IQ4_NL, 4, 128> {
  using Scales = HalfScales;
  INLINE static Bytes value(Bytes numbers) { return looked_up(IQ4_VALUES, numbers); }
};

struct IQ4_XSKind : Kind<IQ4_XS, 4, 128> {
  struct Scales {
    const uint8_t* by_block;
    Floats d;
    INLINE Scales(const uint8_t* tile, int lane)
        : by_block(tile + lane), d(halves(tile + 128 + 2 * lane)) {}
    INLINE Floats scale(int i) const { return d * signed_bytes(by_block + 16 * i); }
  };
  INLINE static Bytes value(Bytes numbers) { return looked_up(IQ4_VALUES, numbers); }
};

struct MXFP4Kind : Kind<MXFP4, 4, 12> {
  struct Scales {
    const uint8_t* exponents;
    INLINE Scales(const uint8_t* tile, int lane) : exponents(tile + lane) {}
    // 2^(e - 128). Those below 2^-126 count as 0, as all such numbers do.
    INLINE Floats scale(int i) const {
      const Ints e = __builtin_convertvector(unsigned_bytes(exponents + 16 * i), Ints);
      return (Floats)(((e - 1) << 23) & (e > 1));
    }
  };
  INLINE static Bytes value(Bytes numbers) { return looked_up(E2M1_VALUES, numbers); }
};

struct NVFP4Kind : Kind<NVFP4, 4, 12, 16> {
  using Scales = HalfScales;
  INLINE static Bytes value(Bytes numbers) { return looked_up(E2M1_VALUES, numbers); }
};

// One scale and one minimum for all columns of a tile.
template <int KIND>
struct Int4Kind : Kind<KIND, 4, 0> {
  static constexpr bool mins = true;
  struct Scales {
    Floats s, m;
    INLINE Scales(const uint8_t* tile, int lane)
        : s(vector_at<Floats>(tile + 4 * lane)), m(vector_at<Floats>(tile + 64 + 4 * lane)) {}
    INLINE Floats scale(int) const { return s; }
    INLINE Floats min(int) const { return m; }
  };
};

// Reads a block: byte 4 c + i of w[v] is number 4 v + i of row c. Vectors are 64 bytes apart.
// `read` loads a vector.
template <class K, class Read>
INLINE void unpack(Bytes (&w)[8], const uint8_t* block, const Read& read) {
  if constexpr (K::bits == 8) {
#pragma GCC unroll 8
    for (int v = 0; v < 8; v++) w[v] = read(block + 64 * v);
  } else {
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
      const Bytes two = read(block + 64 * v);
      w[v] = two & 0x0F0F, w[v + 4] = (two >> 4) & 0x0F0F;
    }
    if constexpr (K::bits == 5) {
      const Bytes high = read(block + 256);
#pragma GCC unroll 8
      for (int v = 0; v < 8; v++)
        w[v] |= (v < 4 ? high << (4 - v) : high >> (v - 4)) & 0x1010;
    }
    if constexpr (K::bits == 6) {
#pragma GCC unroll 2
      for (int g = 0; g < 2; g++) {
        const Bytes high = read(block + 256 + 64 * g);
        w[4 * g] |= (high << 4) & 0x3030, w[4 * g + 1] |= (high << 2) & 0x3030;
        w[4 * g + 2] |= high & 0x3030, w[4 * g + 3] |= (high >> 2) & 0x3030;
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < 8; v++) w[v] = K::value(w[v]);
  }
}

// `Of` with all kinds, in the order of their numbers.
template <template <class...> class Of>
using AllKinds =
    Of<Q4_0Kind, Q4_1Kind, Q5_0Kind, Q5_1Kind, Q8_0Kind, Q4_KKind, Q5_KKind, Q6_KKind, IQ4_NLKind,
       IQ4_XSKind, MXFP4Kind, NVFP4Kind, Int4Kind<INT4_32>, Int4Kind<INT4_64>, Int4Kind<INT4_128>>;
