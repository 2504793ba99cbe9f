// Products of int8 weights with scales; as product_body.h, which comes before it.
//
// Rows are quantised by group: q = round(x / scale), scale = max |x| / 127. Sums over a
// group are exact integers; their lanes are scaled and added up in float32.
//
// Instructions that multiply unsigned by signed bytes take w + 128: then 128 times the
// sum of the row's group is too much, and the sum begins at what takes it away again.

constexpr float LEAST = 1e-30f;  // a group below is 0, as models/quantized.py has it

struct Quantised {  // of one row, one group
  float scale;
  int32_t begin;
};

template <class L>
TARGET inline int64_t int8_stride(const Product& p) {
  return p.groups * rounded_up(p.k / p.groups, L::step);
}

template <class L>
TARGET inline int64_t int8_rows_bytes(const Product& p) {
  const int64_t bytes = p.t * int8_stride<L>(p);
  return rounded_up(bytes * static_cast<int64_t>(sizeof(typename L::Row)), 64);
}

template <class L>
TARGET int64_t int8_packed_bytes(const Product& p) {
  return int8_rows_bytes<L>(p) +
         p.t * p.groups * static_cast<int64_t>(sizeof(Quantised));
}

template <class L>
TARGET void int8_pack(const Product& p, void* packed) {
  const int64_t size = p.k / p.groups, padded = rounded_up(size, L::step);
  auto* to = static_cast<typename L::Row*>(packed);
  auto* facts = reinterpret_cast<Quantised*>(static_cast<char*>(packed) +
                                             int8_rows_bytes<L>(p));
  for (int64_t i = 0; i < p.t * p.groups; i++, to += padded) {
    const float* from = p.rows + i * size;
    float most = 0.0f, nothing = 0.0f;  // `nothing` is NaN where a number is no number
    for (int64_t j = 0; j < size; j++) {
      const float magnitude = __builtin_fabsf(from[j]);
      most = magnitude > most ? magnitude : most;
      nothing += magnitude * 0.0f;
    }
    const bool counts = most >= LEAST && nothing == 0.0f;
    const float inverse = counts ? 127.0f / most : 0.0f;
    int32_t sum = 0;
    for (int64_t j = 0; j < size; j++) {
      // Adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even.
      const float x = counts ? from[j] * inverse : 0.0f;
      const auto q = static_cast<int32_t>((x + 12582912.0f) - 12582912.0f);
      to[j] = static_cast<typename L::Row>(q);
      sum += q;
    }
    for (int64_t j = size; j < padded; j++) to[j] = 0;
    facts[i] = {counts ? most / 127.0f : nothing, -L::offset * sum};
  }
}

template <class L, int R>
TARGET void int8_block(const typename L::Row* rows, int64_t row_stride,
                       const Quantised* facts, const Product& p, int64_t column,
                       Ahead ahead, float* out, int count) {
  const int64_t size = p.k / p.groups, padded = rounded_up(size, L::step);
  const int64_t whole = size / L::step;
  const int rest = static_cast<int>(size - whole * L::step);
  const int8_t* weight[COLUMNS];
  const float* scale[COLUMNS];
  for (int c = 0; c < COLUMNS; c++) {
    const int64_t m = column + (c < count ? c : count - 1);
    weight[c] = static_cast<const int8_t*>(p.weight) + m * p.k;
    scale[c] = p.scale + m * p.groups;
  }
  typename L::Total total[R][COLUMNS];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < COLUMNS; c++) total[r][c] = L::zero();
  for (int64_t g = 0; g < p.groups; g++) {
    typename L::Sum sum[R][COLUMNS];
    for (int r = 0; r < R; r++) {
      const auto begin = L::begin(facts[r * p.groups + g].begin);
      for (int c = 0; c < COLUMNS; c++) sum[r][c] = begin;
    }
    const typename L::Row* x = rows + g * padded;
    for (int64_t s = 0; s < whole + (rest > 0); s++) {
      ahead.fetch(g * (whole + (rest > 0)) + s);
      const int64_t at = g * size + s * L::step;
      typename L::Loaded w[COLUMNS];
      for (int c = 0; c < COLUMNS; c++)
        w[c] = s < whole ? L::weight(weight[c] + at) : L::weight_tail(weight[c] + at, rest);
      for (int r = 0; r < R; r++) {
        const auto q = L::row(x + r * row_stride + s * L::step);
        for (int c = 0; c < COLUMNS; c++) sum[r][c] = L::dot(sum[r][c], w[c], q);
      }
    }
    for (int r = 0; r < R; r++) {
      const float row_scale = facts[r * p.groups + g].scale;
      for (int c = 0; c < COLUMNS; c++)
        total[r][c] = L::add(total[r][c], sum[r][c], row_scale * scale[c][g]);
    }
  }
  for (int r = 0; r < R; r++) L::store(out + r * p.m, total[r], count);
}

template <class L>
TARGET void int8_columns(const Product& p, const void* packed, int64_t begin,
                         int64_t end) {
  const auto* rows = static_cast<const typename L::Row*>(packed);
  const auto* facts = reinterpret_cast<const Quantised*>(
      static_cast<const char*>(packed) + int8_rows_bytes<L>(p));
  const int64_t stride = int8_stride<L>(p);
  const int64_t blocks = (p.t + L::most_rows - 1) / L::most_rows;
  const int64_t size = p.k / p.groups;
  const int64_t steps = p.groups * ((size + L::step - 1) / L::step);
  const int64_t lines = COLUMNS * p.k / 64;
  const int each = static_cast<int>((lines + blocks * steps - 1) / (blocks * steps));
  for (int64_t c = begin; c < end; c += COLUMNS) {
    const int count = static_cast<int>(end - c < COLUMNS ? end - c : COLUMNS);
    const char* next = static_cast<const char*>(p.weight) + (c + COLUMNS) * p.k;
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t first = b * p.t / blocks, last = (b + 1) * p.t / blocks;
      const Ahead ahead{next + b * steps * each * 64, each};
      switch (last - first) {
#define STREE_BLOCK(R)                                                            \
  case R:                                                                         \
    if constexpr (R <= L::most_rows)                                              \
      int8_block<L, R>(rows + first * stride, stride, facts + first * p.groups, p, c, \
                       ahead, p.out + first * p.m + c, count);                    \
    break;
        STREE_BLOCK(1)
        STREE_BLOCK(2)
        STREE_BLOCK(3)
        STREE_BLOCK(4)
#undef STREE_BLOCK
      }
    }
  }
}

template <class L>
constexpr ProductKernel int8_kernel() {
  return {int8_packed_bytes<L>, int8_pack<L>, int8_columns<L>};
}
