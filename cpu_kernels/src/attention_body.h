// Attention from tree nodes to the KV cache and to each other. Include after lanes.h.
//
// The reference implementation in JAX is `tree_attention` in pallas_kernels/attention.py. For each
// query and a range of keys the kernel computes the largest score m, the sum l of exp(score - m),
// and the sum of the values weighted by exp(score - m); such results of two ranges can be merged.
// The ranges of the cache depend only on its length and are merged in order. A query's result
// therefore does not depend on other queries, rows of the batch, threads, or the capacity of the
// cache, bit for bit, with one exception:
//
// For up to FEW queries per KV head, scores are dot products with the keys as stored. For
// more it is faster to transpose a block of keys first, or to use AMX tiles. They sum in different
// orders.

constexpr int64_t KEYS = 64;  // keys whose scores are computed at a time
constexpr int64_t FEW = 6;    // queries of a KV head up to which keys are not transposed

// Products of many wide queries with 16-bit keys and values, for kernels that have tiles. See
// amx_attention.cc, which specializes it.
template <class L>
struct TileProducts {
  static constexpr bool exist = false;
};

struct Queries {
  float *m, *l;     // [rows]
  float* weighted;  // [rows, hd]
};

struct Space {
  void* q;        // [rows, padded], in the form for dot products
  float* wide_q;  // [rows, hd], in float32
  float* scores;  // [rows, KEYS]
  float* keys;    // [hd, KEYS], transposed
  float* values;  // [KEYS, hd], in float32
  void *k, *v;    // [T, hd], of the nodes
  char* tiles;    // space of `TileProducts`, or null
  Queries seen, more;
};

TARGET inline void place_queries(const Attention& a, Layout& layout, Queries* queries) {
  layout.place(&queries->m, a.tile);
  layout.place(&queries->l, a.tile);
  layout.place(&queries->weighted, a.tile * a.hd);
}

template <class L>
TARGET int64_t space_layout(const Attention& a, char* base, Space* space) {
  using Weight = typename L::Weight;
  Layout layout{base};
  layout.place(reinterpret_cast<typename L::Row**>(&space->q),
               a.tile * rounded_up(a.hd, L::step));
  layout.place(&space->wide_q, a.tile * a.hd);
  layout.place(&space->scores, a.tile * KEYS);
  layout.place(&space->keys, a.hd * KEYS);
  layout.place(&space->values, KEYS * a.hd);
  layout.place(reinterpret_cast<Weight**>(&space->k), a.T * a.hd);
  layout.place(reinterpret_cast<Weight**>(&space->v), a.T * a.hd);
  space->tiles = nullptr;
  if constexpr (TileProducts<L>::exist)
    if (TileProducts<L>::fit(a)) layout.place(&space->tiles, TileProducts<L>::bytes(a));
  place_queries(a, layout, &space->seen);
  place_queries(a, layout, &space->more);
  return layout.at;
}

template <class L>
TARGET int64_t attention_bytes(const Attention& a) {
  Space unused;
  return space_layout<L>(a, nullptr, &unused);
}

// Returns the buffer for the sums of a part of the keys, for a tile of queries.
TARGET inline Queries part_of(const Attention& a, int64_t unit, int64_t part) {
  const int64_t size = a.tile * (a.hd + 2);
  float* base = a.partial + (unit * (a.splits + 1) + part) * size;
  return {base, base + a.tile, base + 2 * a.tile};
}

// Returns the number of queries of a row of the batch that share a KV head.
TARGET inline int64_t queries_per_head(const Attention& a, int64_t b) {
  return a.queries[b] * (a.Hq / a.Hk);
}

// Rows [first, last) of the Tq * G queries of a KV head, in the order of nodes.
struct Tile {
  int64_t b, head, first, last;
  TARGET int64_t rows() const { return last - first; }
};

TARGET inline Tile tile_of(const Attention& a, int64_t unit) {
  const int64_t b = unit / a.tiles / a.Hk, rows = queries_per_head(a, b);
  const int64_t begin = unit % a.tiles * a.tile, first = begin < rows ? begin : rows;
  const int64_t last = first + a.tile;
  return {b, unit / a.tiles % a.Hk, first, last < rows ? last : rows};
}

// Returns the offset of a row's query, which is also that of its output.
TARGET inline int64_t place_of(const Attention& a, const Tile& tile, int64_t row) {
  const int64_t G = a.Hq / a.Hk, t = row / G, g = row % G;
  return ((tile.b * a.Tq + t) * a.Hq + tile.head * G + g) * a.hd;
}

template <class L>
TARGET void pack_queries(const Attention& a, const Tile& tile, const Space& space) {
  const int64_t padded = rounded_up(a.hd, L::step);
  for (int64_t r = 0; r < tile.rows(); r++) {
    const float* from = a.q + place_of(a, tile, tile.first + r);
    auto* to = static_cast<typename L::Row*>(space.q) + r * padded;
    float* wide = space.wide_q + r * a.hd;
    for (int64_t i = 0; i < a.hd; i++) to[i] = L::as_row(from[i]);
    for (int64_t i = a.hd; i < padded; i++) to[i] = 0;
    for (int64_t i = 0; i < a.hd; i++)
      wide[i] = sizeof(typename L::Weight) == 2 ? widened(bfloat16_of(from[i])) : from[i];
  }
  if constexpr (TileProducts<L>::exist)
    if (space.tiles) TileProducts<L>::pack(a, tile.rows(), space);
}

TARGET inline void reset(const Attention& a, const Tile& tile, const Queries& to) {
  for (int64_t r = 0; r < tile.rows(); r++) {
    to.m[r] = -__builtin_inff();
    to.l[r] = 0.0f;
    for (int64_t i = 0; i < a.hd; i++) to.weighted[r * a.hd + i] = 0.0f;
  }
}

// Strides between rows of the three matrices of a product.
struct Apart {
  int64_t out, left, right;
};

// out [R, columns] += left [R, count] times right [count, columns], for up to VECTORS vectors
// of columns.
template <int R, int VECTORS>
TARGET inline void add_block(float* out, const float* left, const float* right,
                             int64_t count, int64_t columns, Apart apart) {
  using V = Lanes;
  V::F sum[R][VECTORS];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < VECTORS; c++)
      sum[r][c] = V::load(out + r * apart.out + c * V::W, columns - c * V::W);
  for (int64_t s = 0; s < count; s++) {
    V::F value[VECTORS];
    for (int c = 0; c < VECTORS; c++)
      value[c] = V::load(right + s * apart.right + c * V::W, columns - c * V::W);
    for (int r = 0; r < R; r++) {
      const V::F weight = Float32::all(left[r * apart.left + s]);
      for (int c = 0; c < VECTORS; c++) sum[r][c] = V::fma(weight, value[c], sum[r][c]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < VECTORS; c++)
      V::store(out + r * apart.out + c * V::W, sum[r][c], columns - c * V::W);
}

template <int R>
TARGET void add_rows(float* out, const float* left, const float* right, int64_t count,
                     int64_t columns, Apart apart) {
  constexpr int W = Lanes::W;
  int64_t c = 0;
  for (; c + 4 * W <= columns; c += 4 * W)
    add_block<R, 4>(out + c, left, right + c, count, 4 * W, apart);
  for (; c < columns; c += W)
    add_block<R, 1>(out + c, left, right + c, count, columns - c, apart);
}

TARGET inline void add_product(float* out, const float* left, const float* right,
                               int64_t rows, int64_t count, int64_t columns,
                               Apart apart) {
  constexpr int most = Float32::most_rows;
  for (int64_t r = 0; r < rows; r += most) {
    float* to = out + r * apart.out;
    const float* from = left + r * apart.left;
    switch (rows - r < most ? rows - r : most) {
#define STREE_ROWS(R)                                                               \
  case R:                                                                           \
    if constexpr (R <= most) add_rows<R>(to, from, right, count, columns, apart);   \
    break;
      STREE_ROWS(1)
      STREE_ROWS(2)
      STREE_ROWS(3)
      STREE_ROWS(4)
      STREE_ROWS(5)
      STREE_ROWS(6)
#undef STREE_ROWS
    }
  }
}

// Transposes keys [count, hd] to [hd, KEYS] in float32. Columns past `count` are 0.
template <class E>
TARGET void transpose_keys(const E* keys, int64_t count, int64_t hd, float* to) {
  using V = Lanes;
  for (int64_t s = 0; s < KEYS; s += V::W)
    for (int64_t i = 0; i < hd; i += V::W) {
      V::F block[V::W];
      for (int64_t j = 0; j < V::W; j++)
        block[j] = s + j < count ? V::load(keys + (s + j) * hd + i, hd - i) : V::F{};
      transpose_block(block);
      for (int64_t j = 0; j < V::W && i + j < hd; j++)
        V::store(to + (i + j) * KEYS + s, block[j], V::W);
    }
}

// Converts products of a row's query with keys to weights exp(score - m), 0 for keys that
// `allowed` (if not null) masks and for the first `hidden` ones. Updates m and l. Returns
// exp(old m - m).
TARGET inline float weigh(float* scores, int64_t count, float scale, const uint8_t* allowed,
                          int64_t hidden, float* m, float* l) {
  using V = Lanes;
  const float none = -__builtin_inff();
  if (allowed)
    for (int64_t i = 0; i < count; i++) scores[i] = allowed[i] ? scores[i] * scale : none;
  else
    for (int64_t i = 0; i < count; i++) scores[i] *= scale;
  for (int64_t i = 0; i < hidden; i++) scores[i] = none;
  for (int64_t i = count; i < KEYS; i++) scores[i] = none;
  V::F most = V::F{} + *m;
  for (int64_t i = 0; i < KEYS; i += V::W) {
    const V::F s = V::load(scores + i, V::W);
    most = s > most ? s : most;
  }
  float top = *m;
  for (int i = 0; i < V::W; i++) top = most[i] > top ? most[i] : top;
  bool has_nan = false;  // a NaN compares as not larger than anything
  for (int64_t i = 0; i < count && !(top > none); i++) has_nan |= scores[i] != scores[i];
  if (has_nan) top = 0.0f;
  if (!(top > none)) {  // all keys so far are masked
    for (int64_t i = 0; i < KEYS; i++) scores[i] = 0.0f;
    return 1.0f;
  }
  V::F sum = V::F{};
  for (int64_t i = 0; i < KEYS; i += V::W) {
    const V::F weight = V::exp(V::load(scores + i, V::W) - top);
    V::store(scores + i, weight, V::W);
    sum += weight;
  }
  const float kept = *m < top ? exp_of(*m - top) : 1.0f;
  *l = *l * kept + V::sum(sum);
  *m = top;
  return kept;
}

// Returns the first row of the cache that a row's query sees.
TARGET inline int64_t first_of(const Attention& a, const Tile& tile, int64_t row) {
  return a.first ? a.first[tile.b * a.Tq + (tile.first + row) / (a.Hq / a.Hk)] : 0;
}

// The keys of a block that the queries of a tile see. `allowed` (or null) is the mask [Tq, T], from
// the first of these keys on. `row` is that key's row of the cache, or -1 if the keys are of nodes.
struct Seen {
  const uint8_t* allowed;
  int64_t row, count;

  TARGET const uint8_t* mask_of(const Attention& a, const Tile& tile, int64_t r) const {
    return allowed ? allowed + (tile.first + r) / (a.Hq / a.Hk) * a.T : nullptr;
  }
  // Returns how many of the first keys a row's query does not see.
  TARGET int64_t hidden(const Attention& a, const Tile& tile, int64_t r) const {
    const int64_t before = row < 0 ? 0 : first_of(a, tile, r) - row;
    return before < 0 ? 0 : before < count ? before : count;
  }
};

// Returns the values [count, hd] with zeros in place of those that contain NaN or infinity, whose
// product with the weight 0 of a masked key would be NaN. Adds these to the sums of the queries
// that see them. Overwrites space.keys if there are any.
template <class L>
TARGET __attribute__((noinline)) const typename L::Weight* without_faults(
    const Attention& a, const Tile& tile, const Space& space, const typename L::Weight* v,
    const Seen& seen, const Queries& to) {
  using V = Lanes;
  auto* const clean = reinterpret_cast<typename L::Weight*>(space.keys);
  bool any = false;
  for (int64_t s = 0; s < seen.count; s++) {
    const typename L::Weight* const value = v + s * a.hd;
    V::F zeros = V::F{};
    for (int64_t i = 0; i < a.hd; i += V::W)
      zeros = V::fma(V::load(value + i, a.hd - i), V::F{}, zeros);
    if (V::sum(zeros) == 0.0f) continue;
    if (!any) __builtin_memcpy(clean, v, seen.count * a.hd * sizeof(*v));
    any = true;
    __builtin_memset(clean + s * a.hd, 0, a.hd * sizeof(*v));
    for (int64_t r = 0; r < tile.rows(); r++) {
      const uint8_t* const mask = seen.mask_of(a, tile, r);
      if (s < seen.hidden(a, tile, r) || (mask && !mask[s])) continue;
      const V::F weight = V::F{} + space.scores[r * KEYS + s];
      float* const sum = to.weighted + r * a.hd;
      for (int64_t i = 0; i < a.hd; i += V::W)
        V::store(sum + i,
                 V::fma(weight, V::load(value + i, a.hd - i), V::load(sum + i, a.hd - i)),
                 a.hd - i);
    }
  }
  return any ? clean : v;
}

// Adds up to KEYS keys and values [count, hd] to the queries' sums. `allowed` and `row` are as in
// `Seen`.
template <class L>
TARGET void add_keys(const Attention& a, const Tile& tile, const Space& space,
                     const typename L::Weight* k, const typename L::Weight* v,
                     int64_t count, const uint8_t* allowed, int64_t row, const Queries& to) {
  using V = Lanes;
  const int64_t rows = tile.rows(), all = count * a.hd;
  const Seen seen{allowed, row, count};
  const bool in_tiles = space.tiles && queries_per_head(a, tile.b) > FEW;
  if (in_tiles) {
    if constexpr (TileProducts<L>::exist)
      TileProducts<L>::scores(a, k, count, rows, space);
  } else if (queries_per_head(a, tile.b) <= FEW) {
    const auto* q = static_cast<const typename L::Row*>(space.q);
    for (int64_t c = 0; c < count; c += COLUMNS) {
      const int some = static_cast<int>(count - c < COLUMNS ? count - c : COLUMNS);
      product_rows<L>(q, rounded_up(a.hd, L::step), rows, k + c * a.hd, a.hd,
                      reinterpret_cast<const char*>(v + c * a.hd), space.scores + c,
                      KEYS, some);
    }
  } else {
    transpose_keys(k, count, a.hd, space.keys);
    for (int64_t i = 0; i < rows * KEYS; i++) space.scores[i] = 0.0f;
    add_product(space.scores, space.wide_q, space.keys, rows, a.hd, KEYS,
                {KEYS, a.hd, KEYS});
  }
  bool masked = allowed && a.T > 1;
  for (int64_t r = 0; r < rows; r++) {
    float* scores = space.scores + r * KEYS;
    const int64_t hidden = seen.hidden(a, tile, r);
    masked |= hidden > 0;
    const float kept = weigh(scores, count, a.scale, seen.mask_of(a, tile, r), hidden, to.m + r,
                             to.l + r);
    if (kept != 1.0f)
      for (int64_t i = 0; i < a.hd; i++) to.weighted[r * a.hd + i] *= kept;
  }
  if (masked) v = without_faults<L>(a, tile, space, v, seen, to);
  if (in_tiles) {
    if constexpr (TileProducts<L>::exist)
      TileProducts<L>::add_values(a, v, count, rows, space, to.weighted);
    return;
  }
  const float* values;
  if constexpr (sizeof(*v) == 2) {
    for (int64_t i = 0; i < all; i += V::W)
      V::store(space.values + i, V::load(v + i, all - i), all - i);
    values = space.values;
  } else {
    values = v;
  }
  add_product(to.weighted, space.scores, values, rows, count, a.hd, {a.hd, KEYS, a.hd});
}

// Adds the keys and values of the nodes themselves.
template <class L>
TARGET void add_nodes(const Attention& a, const Tile& tile, const Space& space,
                      const Queries& to) {
  using Weight = typename L::Weight;
  const auto gather = [&](void* array, const void* from) {
    for (int64_t t = 0; t < a.T; t++)
      __builtin_memcpy(static_cast<Weight*>(array) + t * a.hd,
                       static_cast<const Weight*>(from) +
                           ((tile.b * a.T + t) * a.Hk + tile.head) * a.hd,
                       a.hd * sizeof(Weight));
  };
  gather(space.k, a.k);
  gather(space.v, a.v);
  const int64_t G = a.Hq / a.Hk, from = tile.first / G, to_row = (tile.last - 1) / G;
  const uint8_t* mask = a.mask + tile.b * a.Tq * a.T;
  for (int64_t t = 0; t < a.T; t += KEYS) {
    const int64_t count = a.T - t < KEYS ? a.T - t : KEYS;
    bool any = false;
    for (int64_t row = from; row <= to_row && !any; row++)
      for (int64_t i = 0; i < count; i++) any |= mask[row * a.T + t + i] != 0;
    if (!any) continue;
    const auto* k = static_cast<const Weight*>(space.k) + t * a.hd;
    const auto* v = static_cast<const Weight*>(space.v) + t * a.hd;
    add_keys<L>(a, tile, space, k, v, count, mask + t, -1, to);
  }
}

// Adds rows [begin, end) of the cache.
template <class L>
TARGET void add_cache(const Attention& a, const Tile& tile, const Space& space,
                      int64_t begin, int64_t end, const Queries& to) {
  using Weight = typename L::Weight;
  const int64_t base = (tile.b * a.Hk + tile.head) * a.S;
  const auto* k = static_cast<const Weight*>(a.k_cache) + base * a.hd;
  const auto* v = static_cast<const Weight*>(a.v_cache) + base * a.hd;
  int64_t first = end;
  for (int64_t r = 0; r < tile.rows(); r++)
    first = first_of(a, tile, r) < first ? first_of(a, tile, r) : first;
  for (int64_t s = begin; s < end; s += KEYS) {
    const int64_t count = end - s < KEYS ? end - s : KEYS;
    if (s + count <= first) continue;
    add_keys<L>(a, tile, space, k + s * a.hd, v + s * a.hd, count, nullptr, s, to);
  }
}

TARGET inline void merge(const Attention& a, const Tile& tile, const Queries& seen,
                         const Queries& more) {
  for (int64_t r = 0; r < tile.rows(); r++) {
    const float top = seen.m[r] > more.m[r] ? seen.m[r] : more.m[r];
    if (!(more.m[r] > -__builtin_inff())) continue;
    const float old = exp_of(seen.m[r] - top), now = exp_of(more.m[r] - top);
    seen.m[r] = top;
    seen.l[r] = seen.l[r] * old + more.l[r] * now;
    float* sum = seen.weighted + r * a.hd;
    const float* other = more.weighted + r * a.hd;
    for (int64_t i = 0; i < a.hd; i++) sum[i] = sum[i] * old + other[i] * now;
  }
}

TARGET inline void write_tile(const Attention& a, const Tile& tile, const Queries& seen) {
  for (int64_t r = 0; r < tile.rows(); r++) {
    float* out = a.out + place_of(a, tile, tile.first + r);
    float inverse = seen.l[r] > 0.0f ? 1.0f / seen.l[r] : 0.0f;
    if (a.sink && seen.l[r] > 0.0f) {
      const float sink = a.sink[place_of(a, tile, tile.first + r) / a.hd % a.Hq];
      const float top = seen.m[r] > sink ? seen.m[r] : sink, kept = exp_of(seen.m[r] - top);
      inverse = kept / (seen.l[r] * kept + exp_of(sink - top));
    }
    for (int64_t i = 0; i < a.hd; i++) out[i] = seen.weighted[r * a.hd + i] * inverse;
  }
}

TARGET inline int64_t cached(const Attention& a, int64_t b) {
  const int64_t length = a.length[b];
  return length < 0 ? 0 : length < a.S ? length : a.S;
}

// Computes the sums of one part of the keys. Part 0 is the nodes, the others are of the cache.
template <class L>
TARGET void one_part(const Attention& a, const Tile& tile, const Space& space,
                     int64_t part, const Queries& to) {
  reset(a, tile, to);
  const int64_t length = cached(a, tile.b), size = split_rows(length);
  if (part == 0) return add_nodes<L>(a, tile, space, to);
  const int64_t begin = (part - 1) * size, end = begin + size;
  add_cache<L>(a, tile, space, begin, end < length ? end : length, to);
}

template <class L>
TARGET void attention_part(const Attention& a, void* scratch, int64_t unit,
                           int64_t part) {
  Space space;
  space_layout<L>(a, static_cast<char*>(scratch), &space);
  const Tile tile = tile_of(a, unit);
  if (tile.rows() == 0) return;
  pack_queries<L>(a, tile, space);
  one_part<L>(a, tile, space, part, part_of(a, unit, part));
}

TARGET inline void attention_merge(const Attention& a, int64_t unit) {
  const Tile tile = tile_of(a, unit);
  const Queries seen = part_of(a, unit, 0);
  for (int64_t part = 1; part <= split_count(cached(a, tile.b)); part++)
    merge(a, tile, seen, part_of(a, unit, part));
  write_tile(a, tile, seen);
}

// Computes and merges all parts in one thread.
template <class L>
TARGET void attention_whole(const Attention& a, void* scratch, int64_t unit) {
  Space space;
  space_layout<L>(a, static_cast<char*>(scratch), &space);
  const Tile tile = tile_of(a, unit);
  if (tile.rows() == 0) return;
  pack_queries<L>(a, tile, space);
  one_part<L>(a, tile, space, 0, space.seen);
  for (int64_t part = 1; part <= split_count(cached(a, tile.b)); part++) {
    one_part<L>(a, tile, space, part, space.more);
    merge(a, tile, space.seen, space.more);
  }
  write_tile(a, tile, space.seen);
}

template <class L>
constexpr AttentionKernel attention_kernel() {
  return {attention_bytes<L>, attention_part<L>, attention_merge, attention_whole<L>};
}
