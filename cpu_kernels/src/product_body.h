// Products of few rows, for the lanes of one instruction set.
//
// Included once for every instruction set, inside its namespace, with TARGET defined.
// No standard header's inline function is used here: the linker keeps one copy of such a
// function for the whole library, and it must not be the one made for AVX-512.
//
// A result is the sum of one accumulator over k, in steps of `step`, and then over its
// lanes. It knows nothing of other rows, columns or threads.

constexpr int COLUMNS = 4;  // of a block; their weights are consecutive in memory

TARGET inline int64_t rounded_up(int64_t n, int64_t step) {
  return (n + step - 1) / step * step;
}

// What is to be in the cache for the next block: `bytes` from `from` on, in equal parts
// fetched during each step of this one.
struct Ahead {
  const char* from;
  int lines;  // of 64 bytes, a step

  TARGET inline void fetch(int64_t step) const {
    const char* line = from + step * lines * 64;
    for (int i = 0; i < lines; i++, line += 64) __builtin_prefetch(line, 0, 3);
  }
};

// Adds up steps `from` to `to` of R rows and 4 columns, `apart` in memory. Addresses are
// one pointer and distances: as many pointers would not fit in registers.
template <class L, int R, class A>
TARGET inline __attribute__((always_inline)) void add_steps(
    typename L::Sum (&sum)[R][COLUMNS], const typename L::Row* rows, int64_t row_stride,
    const typename L::Weight* weight, int64_t apart, int64_t from, int64_t to,
    A& ahead) {
  const typename L::Weight* w = weight + from * L::step;
  const typename L::Row* x = rows + from * L::step;
  for (int64_t s = from; s < to; s++, w += L::step, x += L::step) {
    ahead.fetch(s);
    typename L::Loaded of[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) of[c] = L::weight(w + c * apart);
    for (int r = 0; r < R; r++) {
      const auto row = L::row(x + r * row_stride);
      for (int c = 0; c < COLUMNS; c++) sum[r][c] = L::dot(sum[r][c], of[c], row);
    }
  }
}

// What is left of k after whole steps, and then the sums over lanes.
template <class L, int R>
TARGET inline __attribute__((always_inline)) void finish(
    typename L::Sum (&sum)[R][COLUMNS], const typename L::Row* rows, int64_t row_stride,
    const typename L::Weight* weight, int64_t apart, int64_t k, float* out,
    int64_t stride, int count) {
  const int64_t whole = k / L::step * L::step;
  if (const int rest = static_cast<int>(k - whole)) {
    typename L::Loaded of[COLUMNS];
    for (int c = 0; c < COLUMNS; c++)
      of[c] = L::weight_tail(weight + c * apart + whole, rest);
    for (int r = 0; r < R; r++) {
      const auto row = L::row(rows + r * row_stride + whole);
      for (int c = 0; c < COLUMNS; c++) sum[r][c] = L::dot(sum[r][c], of[c], row);
    }
  }
  for (int r = 0; r < R; r++) L::store(out + r * stride, sum[r], count);
}

// out[r * stride + c] of R rows and 4 columns, of which `count` are wanted.
template <class L, int R>
TARGET void product_block(const typename L::Row* rows, int64_t row_stride,
                          const typename L::Weight* weight, int64_t apart, int64_t k,
                          Ahead ahead, float* out, int64_t stride, int count) {
  typename L::Sum sum[R][COLUMNS];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < COLUMNS; c++) sum[r][c] = L::zero();
  add_steps<L, R>(sum, rows, row_stride, weight, apart, 0, k / L::step, ahead);
  finish<L, R>(sum, rows, row_stride, weight, apart, k, out, stride, count);
}

// 4 columns of all t rows, which are taken in equal blocks of at most L::most_rows.
template <class L>
TARGET void product_rows(const typename L::Row* rows, int64_t row_stride, int64_t t,
                         const typename L::Weight* weight, int64_t k, const char* next,
                         float* out, int64_t stride, int count) {
  if (count > 1 && count < COLUMNS) {  // a weight's last ones, one after another
    for (int c = 0; c < count; c++)
      product_rows<L>(rows, row_stride, t, weight + c * k, k, next, out + c, stride, 1);
    return;
  }
  const int64_t apart = count == 1 ? 0 : k;
  const int64_t blocks = (t + L::most_rows - 1) / L::most_rows;
  const int64_t steps = k / L::step ? k / L::step : 1;
  const int64_t lines = COLUMNS * k * static_cast<int64_t>(sizeof(*weight)) / 64;
  const int each = static_cast<int>((lines + blocks * steps - 1) / (blocks * steps));
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t first = b * t / blocks, last = (b + 1) * t / blocks;
    const auto* x = rows + first * row_stride;
    float* y = out + first * stride;
    const Ahead ahead{next + b * steps * each * 64, each};
    switch (last - first) {
#define STREE_BLOCK(R)                                                                \
  case R:                                                                             \
    if constexpr (R <= L::most_rows)                                                  \
      product_block<L, R>(x, row_stride, weight, apart, k, ahead, y, stride, count);  \
    break;
      STREE_BLOCK(1)
      STREE_BLOCK(2)
      STREE_BLOCK(3)
      STREE_BLOCK(4)
      STREE_BLOCK(5)
      STREE_BLOCK(6)
#undef STREE_BLOCK
    }
  }
}

// Numbers from one packed row to the next: a line more where all rows would fall into
// the same few sets of the cache.
template <class L>
TARGET int64_t packed_stride(int64_t k) {
  const int64_t stride = rounded_up(k, L::step);
  const bool alike = stride * static_cast<int64_t>(sizeof(typename L::Row)) % 1024 == 0;
  return stride + (alike ? L::step : 0);
}

template <class L>
TARGET int64_t product_packed_bytes(const Product& p) {
  return p.t * packed_stride<L>(p.k) * static_cast<int64_t>(sizeof(typename L::Row));
}

template <class L>
TARGET void product_pack(const Product& p, void* packed) {
  const int64_t stride = packed_stride<L>(p.k);
  for (int64_t r = 0; r < p.t; r++) {
    const float* from = p.rows + r * p.k;
    auto* to = static_cast<typename L::Row*>(packed) + r * stride;
    for (int64_t i = 0; i < p.k; i++) to[i] = L::as_row(from[i]);
    for (int64_t i = p.k; i < stride; i++) to[i] = 0;
  }
}

// Of many rows, which do not fit in the nearest cache beside the weights: SPAN steps of up
// to NEAR rows stay there while WIDE columns are done, whose sums are kept in between.
constexpr int64_t SPAN = 16, NEAR = 18, WIDE = 16, MANY_BYTES = 1 << 15;

// What the next columns need, fetched evenly during all steps of these.
struct Evenly {
  const char* from;
  int64_t bytes, share;  // a step fetches bytes / share lines
  int64_t due = 0;

  TARGET inline void fetch(int64_t) {
    for (due += bytes; due >= share; due -= share, from += 64)
      __builtin_prefetch(from, 0, 3);
  }
};

// As product_block, of steps `from` to `to`; `kept` has the sums before and after.
template <class L, int R>
TARGET void product_span(const typename L::Row* rows, int64_t row_stride,
                         const typename L::Weight* weight, int64_t k, int64_t from,
                         int64_t to, typename L::Sum (*kept)[COLUMNS], Evenly& fetched,
                         float* out, int64_t stride) {
  typename L::Sum sum[R][COLUMNS];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < COLUMNS; c++) sum[r][c] = from ? kept[r][c] : L::zero();
  Evenly ahead = fetched;
  add_steps<L, R>(sum, rows, row_stride, weight, k, from, to, ahead);
  fetched = ahead;
  if (to == k / L::step)
    return finish<L, R>(sum, rows, row_stride, weight, k, k, out, stride, COLUMNS);
  for (int r = 0; r < R; r++)
    for (int c = 0; c < COLUMNS; c++) kept[r][c] = sum[r][c];
}

// Columns `begin` to `end`, at most WIDE and a multiple of 4, of the row blocks from
// `first` to `last` of `blocks`.
template <class L>
TARGET void product_near(const Product& p, const typename L::Row* rows,
                         int64_t row_stride, int64_t begin, int64_t end, int64_t first,
                         int64_t last, int64_t blocks, Evenly& ahead) {
  alignas(64) typename L::Sum kept[WIDE / COLUMNS][NEAR][COLUMNS];
  const auto* weight = static_cast<const typename L::Weight*>(p.weight);
  const int64_t steps = p.k / L::step, spans = (steps + SPAN - 1) / SPAN;
  const int64_t above = p.t * first / blocks;
  for (int64_t span = 0; span < spans; span++) {
    const int64_t from = steps * span / spans, to = steps * (span + 1) / spans;
    for (int64_t c = begin; c < end; c += COLUMNS) {
      for (int64_t b = first; b < last; b++) {
        const int64_t row = p.t * b / blocks, next = p.t * (b + 1) / blocks;
        auto* sums = kept[(c - begin) / COLUMNS] + (row - above);
        const auto* x = rows + row * row_stride;
        float* y = p.out + row * p.m + c;
        switch (next - row) {
#define STREE_BLOCK(R)                                                                \
  case R:                                                                             \
    if constexpr (R <= L::most_rows)                                                  \
      product_span<L, R>(x, row_stride, weight + c * p.k, p.k, from, to, sums, ahead, \
                         y, p.m);                                                     \
    break;
          STREE_BLOCK(1)
          STREE_BLOCK(2)
          STREE_BLOCK(3)
          STREE_BLOCK(4)
          STREE_BLOCK(5)
          STREE_BLOCK(6)
#undef STREE_BLOCK
        }
      }
    }
  }
}

// Whole blocks of columns of many rows; sums are those of product_block, bit for bit.
template <class L>
TARGET void product_many(const Product& p, const typename L::Row* rows,
                         int64_t row_stride, int64_t begin, int64_t end) {
  constexpr int64_t each = NEAR / L::most_rows;  // row blocks that are near
  const int64_t blocks = (p.t + L::most_rows - 1) / L::most_rows;
  const int64_t groups = (blocks + each - 1) / each;
  const auto* weight = static_cast<const typename L::Weight*>(p.weight);
  constexpr int64_t bytes = COLUMNS * L::step * static_cast<int64_t>(sizeof(*weight));
  Evenly ahead{nullptr, bytes, 64 * blocks};
  for (int64_t c = begin; c < end; c += WIDE) {
    const int64_t past = c + WIDE < end ? c + WIDE : end;
    ahead.from = reinterpret_cast<const char*>(weight + past * p.k);
    for (int64_t g = 0; g < groups; g++)
      product_near<L>(p, rows, row_stride, c, past, blocks * g / groups,
                      blocks * (g + 1) / groups, blocks, ahead);
  }
}

template <class L>
TARGET void product_columns(const Product& p, const void* packed, int64_t begin,
                            int64_t end) {
  const auto* rows = static_cast<const typename L::Row*>(packed);
  const auto* weight = static_cast<const typename L::Weight*>(p.weight);
  const int64_t stride = packed_stride<L>(p.k);
  const bool many = p.t * stride * static_cast<int64_t>(sizeof(*rows)) > MANY_BYTES;
  if (many && p.k >= L::step) {
    const int64_t whole = (end - begin) / COLUMNS * COLUMNS;
    product_many<L>(p, rows, stride, begin, begin + whole);
    begin += whole;
  }
  for (int64_t c = begin; c < end; c += COLUMNS) {
    const int count = static_cast<int>(end - c < COLUMNS ? end - c : COLUMNS);
    const auto* next = reinterpret_cast<const char*>(weight + (c + COLUMNS) * p.k);
    product_rows<L>(rows, stride, p.t, weight + c * p.k, p.k, next, p.out + c, p.m,
                    count);
  }
}

template <class L>
constexpr ProductKernel product_kernel() {
  return {product_packed_bytes<L>, product_pack<L>, product_columns<L>};
}

// A float as bfloat16, to the nearest, ties to even; NaN stays NaN.
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
