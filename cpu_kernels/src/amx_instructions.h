// AMX instructions. Include inside a namespace, with TARGET defined.
//
// Inline assembly, because the compilers' intrinsics do not declare the access to memory.
template <int N>
TARGET inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(N) : "memory");
}
template <int N>
TARGET inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(N) : "memory");
}
template <int N>
TARGET inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(N));
}

// Adds products of signed bytes: of the rows in tile A with the columns of tile B.
template <int SUMS, int A, int B>
TARGET inline void dot_tiles() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(A), "i"(B));
}

struct TileShapes {
  uint8_t palette = 1, start, reserved[14];
  uint16_t bytes[16];  // of a row
  uint8_t rows[16];
};
TARGET inline void configure_tiles(const TileShapes& shapes) {
  asm volatile("ldtilecfg %0" : : "m"(shapes));
}
TARGET inline void release_tiles() { asm volatile("tilerelease"); }

template <int N>
struct Constant {
  static constexpr int value = N;
};
