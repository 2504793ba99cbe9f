// Products with int8 weights and scales. Include after product_body.h.
//
// Rows are quantized per group: q = round(x / scale), scale = max |x| / 127. Sums over a
// group are exact integers; their lanes are scaled and summed in float32.
//
// Instructions that multiply unsigned by signed bytes get w + 128. This adds 128 times the sum
// of the row to every lane, so each lane begins at minus that.

// A group whose largest magnitude is below this is 0; same as in models/weights/int8.py.
constexpr float MIN_GROUP_MAX = 1e-30f;

// The packed rows of one product.
template <class L>
struct Quantized {
  typename L::Row* q;  // [t, groups, padded]
  float* scale;        // [t, groups]
  int32_t* begin;      // [t, groups, lanes]
  int64_t size, padded, bytes;

  TARGET Quantized(const Product& p, void* packed) {
    size = p.k / p.groups, padded = rounded_up(size, L::step);
    const int64_t count = p.t * p.groups;
    auto* base = static_cast<char*>(packed);
    q = static_cast<typename L::Row*>(packed);
    bytes = rounded_up(count * padded * static_cast<int64_t>(sizeof(*q)), 64);
    scale = reinterpret_cast<float*>(base + bytes);
    bytes += rounded_up(4 * count, 64);
    begin = reinterpret_cast<int32_t*>(base + bytes);
    bytes += 4 * count * L::lanes;
  }
};

template <class L>
TARGET int64_t int8_packed_bytes(const Product& p) {
  return Quantized<L>(p, nullptr).bytes;
}

// Quantizes a group of a row to q, padded with 0 to `padded` numbers. Returns its scale.
template <class Row>
TARGET inline float quantized(const float* from, int64_t size, int64_t padded, Row* q) {
  uint32_t bits = 0;  // bits of the largest magnitude; infinity and NaN have larger bits
  for (int64_t j = 0; j < size; j++) {
    uint32_t magnitude;
    __builtin_memcpy(&magnitude, from + j, 4);
    magnitude &= 0x7FFFFFFF;
    bits = magnitude > bits ? magnitude : bits;
  }
  float group_max;
  __builtin_memcpy(&group_max, &bits, 4);
  const bool finite = bits < 0x7F800000, is_normal = finite && group_max >= MIN_GROUP_MAX;
  if (is_normal) {
    const float inverse = 127.0f / group_max;
    // Adding and subtracting 1.5 * 2^23 rounds to nearest, ties to even.
    for (int64_t j = 0; j < size; j++)
      q[j] = static_cast<Row>(
          static_cast<int32_t>((from[j] * inverse + 12582912.0f) - 12582912.0f));
  }
  for (int64_t j = is_normal ? size : 0; j < padded; j++) q[j] = 0;
  return is_normal ? group_max / 127.0f : finite ? 0.0f : __builtin_nanf("");
}

template <class L>
TARGET void int8_pack(const Product& p, void* packed) {
  const Quantized<L> rows(p, packed);
  constexpr int part = L::step / L::lanes;
  for (int64_t i = 0; i < p.t * p.groups; i++) {
    typename L::Row* to = rows.q + i * rows.padded;
    rows.scale[i] = quantized(p.rows + i * rows.size, rows.size, rows.padded, to);
    for (int lane = 0; lane < L::lanes; lane++) {
      int32_t sum = 0;
      for (int64_t s = 0; s < rows.padded; s += L::step)
        for (int j = 0; j < part; j++) sum += to[s + lane * part + j];
      rows.begin[i * L::lanes + lane] = -L::offset * sum;
    }
  }
}

// Sums over a group, of R rows and 4 columns of the weight.
template <class L, int R>
struct Sums {
  typename L::Sum of[R][COLUMNS];
};

// Computes the sums over a group.
template <class L, int R>
TARGET inline __attribute__((always_inline)) void int8_sums(
    Sums<L, R>& sums, const Quantized<L>& rows, int64_t row, int64_t group,
    int64_t groups, const int8_t* const (&weight)[COLUMNS], Ahead& ahead) {
  const int64_t whole = rows.size / L::step, stride = groups * rows.padded;
  const int rest = static_cast<int>(rows.size - whole * L::step);
  const typename L::Row* x = rows.q + row * stride + group * rows.padded;
  const int32_t* begin = rows.begin + (row * groups + group) * L::lanes;
  typename L::Sum sum[R][COLUMNS];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < COLUMNS; c++) sum[r][c] = L::begin(begin + r * groups * L::lanes);
  for (int64_t s = 0; s < whole; s++) {
    ahead.fetch();
    typename L::Loaded w[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) w[c] = L::weight(weight[c] + s * L::step);
    for (int r = 0; r < R; r++) {
      const auto q = L::row(x + r * stride + s * L::step);
      for (int c = 0; c < COLUMNS; c++) sum[r][c] = L::dot(sum[r][c], w[c], q);
    }
  }
  if (rest) {
    typename L::Loaded w[COLUMNS];
    for (int c = 0; c < COLUMNS; c++)
      w[c] = L::weight_tail(weight[c] + whole * L::step, rest);
    for (int r = 0; r < R; r++) {
      const auto q = L::row(x + r * stride + whole * L::step);
      for (int c = 0; c < COLUMNS; c++) sum[r][c] = L::dot(sum[r][c], w[c], q);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < COLUMNS; c++) sums.of[r][c] = sum[r][c];
}

// The same as `int8_sums`, but not inlined, so that its loop can use all registers. The call
// costs little if a group has many columns.
template <class L, int R>
TARGET __attribute__((noinline)) void int8_sums_apart(
    Sums<L, R>& sums, const Quantized<L>& rows, int64_t row, int64_t group,
    int64_t groups, const int8_t* const (&weight)[COLUMNS], Ahead& ahead) {
  int8_sums<L, R>(sums, rows, row, group, groups, weight, ahead);
}

// Computes a block of the product: R rows from `first` on, and the next `count` columns from
// `column` on (`count` <= COLUMNS = 4; fewer than 4 only at the end). `ahead` prefetches the
// weight of the next block. APART chooses the loop for long groups, see `int8_all`.
template <class L, int R, bool APART>
TARGET void int8_block(const Quantized<L>& rows, int64_t first, const Product& p,
                       int64_t column, Ahead ahead, int count) {
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
    Sums<L, R> sums;
    if constexpr (APART)
      int8_sums_apart<L, R>(sums, rows, first, g, p.groups, weight, ahead);
    else
      int8_sums<L, R>(sums, rows, first, g, p.groups, weight, ahead);
    for (int c = 0; c < COLUMNS; c++) weight[c] += rows.size;
    for (int r = 0; r < R; r++) {
      const float row_scale = rows.scale[(first + r) * p.groups + g];
      for (int c = 0; c < COLUMNS; c++)
        total[r][c] = L::add(total[r][c], sums.of[r][c], row_scale * scale[c][g]);
    }
  }
  float* out = p.out + first * p.m + column;
  for (int r = 0; r < R; r++) L::store(out + r * p.m, total[r], count);
}

// Computes the columns from `begin` to `end`, in blocks of rows. If a block keeps both the sums
// of a group and the totals of all groups in registers, it can have only half as many rows.
// APART, for long and therefore few groups, keeps the totals in memory and uses larger blocks.
template <class L, bool APART>
TARGET void int8_all(const Product& p, void* packed, int64_t begin, int64_t end) {
  constexpr int most = APART ? L::most_rows : (L::most_rows + 1) / 2;
  const Quantized<L> rows(p, packed);
  const int64_t blocks = (p.t + most - 1) / most;
  const int64_t whole = rows.size / L::step, steps = whole ? p.groups * whole : 1;
  const int64_t each = (COLUMNS * p.k + blocks * steps - 1) / (blocks * steps);
  for (int64_t c = begin; c < end; c += COLUMNS) {
    const int count = static_cast<int>(end - c < COLUMNS ? end - c : COLUMNS);
    const char* next = static_cast<const char*>(p.weight) + (c + COLUMNS) * p.k;
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t first = b * p.t / blocks, last = (b + 1) * p.t / blocks;
      const Ahead ahead(next + b * steps * each, each, int8_into_all_caches);
      switch (last - first) {
#define STREE_BLOCK(R)                                           \
  case R:                                                        \
    if constexpr (R <= most)                                     \
      int8_block<L, R, APART>(rows, first, p, c, ahead, count);  \
    break;
        STREE_UP_TO_6(STREE_BLOCK)
#undef STREE_BLOCK
      }
    }
  }
}

template <class L>
TARGET void int8_columns(const Product& p, const void* packed, Columns now, Columns) {
  void* rows = const_cast<void*>(packed);  // only read
  if (p.k / p.groups >= 8 * L::step)
    int8_all<L, true>(p, rows, now.begin, now.end);
  else
    int8_all<L, false>(p, rows, now.begin, now.end);
}

template <class L>
constexpr ProductKernel int8_kernel() {
  return {int8_packed_bytes<L>, int8_pack<L>, int8_columns<L>, COLUMNS, nullptr};
}
