// AMX tiles. Include inside a namespace, with TARGET defined, after avx512_lanes.h.
//
// A tile has 16 lines of at most 64 bytes. A tile of weights is 16 rows of the weight. A tile
// of the product's rows interleaves 16 rows in units of 4 bytes: line j holds bytes 4 j to
// 4 j + 3 of each row. The sums then have one line per row of the weight and one column per
// row of the product; they are transposed when they are stored.
//
// Each element sums over k in order, independently of the rest of its tile.

#include "amx_instructions.h"

constexpr int TILE = 16, LINE = 64, TILE_BYTES = TILE * LINE;

struct Bfloat16Tiles {
  static constexpr int size = 2;  // bytes of a number
  template <int S, int W, int R>
  TARGET static inline void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(S), "i"(W), "i"(R));
  }
};

// Configures this thread's tiles for the lifetime of the object. Tiles have 16 lines of 64
// bytes; those in the bit mask `narrow` (a bit per register) have lines of `columns` * 4 bytes.
class Tiles {
 public:
  explicit Tiles(int columns = TILE, unsigned narrow = 0) {
    alignas(LINE) TileShapes shapes{};
    for (int i = 0; i < 8; i++) {
      shapes.bytes[i] = static_cast<uint16_t>(narrow >> i & 1 ? 4 * columns : LINE);
      shapes.rows[i] = TILE;
    }
    configure_tiles(shapes);
  }
  ~Tiles() { release_tiles(); }
};

// Rows of a weight: `count` rows of `bytes` bytes, `stride` bytes apart.
struct Weights {
  const char* from;
  int64_t stride, bytes;
  int count;
};

// Transposes sixteen lines of 64 bytes into a tile.
TARGET inline void put_tile(char* to, __m512 (&lines)[TILE]) {
  transpose_block(lines);
  for (int i = 0; i < TILE; i++) _mm512_store_ps(to + i * LINE, lines[i]);
}

// Returns the mask of the first n lanes.
TARGET inline __mmask16 some(int64_t n) {
  return static_cast<__mmask16>(n >= 16 ? 0xFFFF : n <= 0 ? 0 : (1u << n) - 1);
}

TARGET inline int64_t blocks_of(int64_t t) { return (t + TILE - 1) / TILE; }
