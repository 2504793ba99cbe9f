// Tiles of AMX; included inside a namespace, with TARGET defined, after avx512_lanes.h.
//
// A tile has 16 lines of at most 64 bytes. A tile of weights is 16 rows of the weight. A tile
// of the product's rows holds, 4 bytes at a time, what 16 of them have there: line j has their
// bytes 4 j to 4 j + 3. Sums then have a line for each row of the weight and a column for
// each row of the product, and are turned when they are stored.
//
// An element's sum goes through k in order, whatever else is in its tile.

constexpr int TILE = 16, LINE = 64, TILE_BYTES = TILE * LINE;

// The compilers' own functions do not say that a tile is read from memory.
template <int N>
TARGET inline void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(N) : "memory");
}
template <int N>
TARGET inline void store(void* to) {
  const int64_t stride = LINE;
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(N) : "memory");
}
template <int N>
TARGET inline void clear() {
  asm volatile("tilezero %%tmm%c0" : : "i"(N));
}

struct Bfloat16Tiles {
  static constexpr int size = 2;  // bytes of a number
  template <int S, int W, int R>
  TARGET static inline void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(S), "i"(W), "i"(R));
  }
};

// Tiles of this thread have 16 lines for as long as this lives, and those of `narrow`, a bit
// for each register, `columns` of 4 bytes; the others are whole.
class Tiles {
 public:
  explicit Tiles(int columns = TILE, unsigned narrow = 0) {
    alignas(LINE) Shape shape{};
    shape.palette = 1;
    for (int i = 0; i < 8; i++) {
      shape.bytes[i] = static_cast<uint16_t>(narrow >> i & 1 ? 4 * columns : LINE);
      shape.rows[i] = TILE;
    }
    asm volatile("ldtilecfg %0" : : "m"(shape));
  }
  ~Tiles() { asm volatile("tilerelease"); }

 private:
  struct Shape {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  };
};

// Some rows of a weight, and how many bytes of each are in question.
struct Weights {
  const char* from;
  int64_t stride, bytes;
  int count;
};

// Sixteen lines of 64 bytes as a tile.
TARGET inline void put_tile(char* to, __m512 (&lines)[TILE]) {
  turn_block(lines);
  for (int i = 0; i < TILE; i++) _mm512_store_ps(to + i * LINE, lines[i]);
}

// The first n lanes.
TARGET inline __mmask16 some(int64_t n) {
  return static_cast<__mmask16>(n >= 16 ? 0xFFFF : n <= 0 ? 0 : (1u << n) - 1);
}

TARGET inline int64_t blocks_of(int64_t t) { return (t + TILE - 1) / TILE; }
