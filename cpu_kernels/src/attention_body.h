// Attention from tree nodes to the KV cache and to each other. Include after lanes.h.
//
// The reference implementation in JAX is `tree_attention` in pallas_kernels/attention.py. A key has
// a place in the text, whether it is in the cache or of a node: a query sees the cache up to its
// end and then its ancestors, in the order of their places. Places are divided into blocks and
// these into parts, whose borders are multiples of KEYS and PART. For a query and a part the kernel
// computes the largest score m, the sum l of exp(score - m), and the sum of the values weighted by
// exp(score - m), block by block; then the parts are merged in order. All sums go over keys in the
// order of places. So the result of a query depends on its text alone, bit for bit: not on what is
// in the cache yet, on other queries, rows of the batch, threads, or the capacity of the cache.

constexpr int64_t KEYS = 64;  // places of a block

// Products of wide queries with 16-bit keys, for kernels that have tiles. See amx_attention.cc,
// which specializes it.
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
  float* scores;  // [rows, KEYS], by place
  float* of_nodes;  // [rows, KEYS], scores or weights of some nodes
  float* values;  // [KEYS, hd], in float32
  void* clean;    // [KEYS, hd], see `without_faults`
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
  layout.place(&space->scores, a.tile * KEYS);
  layout.place(&space->of_nodes, a.tile * KEYS);
  layout.place(&space->values, KEYS * a.hd);
  layout.place(reinterpret_cast<Weight**>(&space->clean), KEYS * a.hd);
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
  float* base = a.partial + (unit * a.parts + part) * size;
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

// Copies a tile's queries, and the keys and values of all nodes.
template <class L>
TARGET void pack_tile(const Attention& a, const Tile& tile, const Space& space) {
  using Weight = typename L::Weight;
  const int64_t padded = rounded_up(a.hd, L::step);
  for (int64_t r = 0; r < tile.rows(); r++) {
    const float* from = a.q + place_of(a, tile, tile.first + r);
    auto* to = static_cast<typename L::Row*>(space.q) + r * padded;
    for (int64_t i = 0; i < a.hd; i++) to[i] = L::as_row(from[i]);
    for (int64_t i = a.hd; i < padded; i++) to[i] = 0;
  }
  const auto gather = [&](void* array, const void* from) {
    for (int64_t t = 0; t < a.T; t++)
      __builtin_memcpy(static_cast<Weight*>(array) + t * a.hd,
                       static_cast<const Weight*>(from) +
                           ((tile.b * a.T + t) * a.Hk + tile.head) * a.hd,
                       a.hd * sizeof(Weight));
  };
  gather(space.k, a.k);
  gather(space.v, a.v);
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

// Converts products of a row's query with keys to weights exp(score - m), 0 for places outside
// [from, to). Updates m and l. Returns exp(old m - m).
TARGET inline float weigh(float* scores, int64_t from, int64_t to, float scale, float* m,
                          float* l) {
  using V = Lanes;
  const float none = -__builtin_inff();
  for (int64_t i = 0; i < KEYS; i++) scores[i] = i < from || i >= to ? none : scores[i] * scale;
  V::F most = V::F{} + *m;
  for (int64_t i = 0; i < KEYS; i += V::W) {
    const V::F s = V::load(scores + i, V::W);
    most = s > most ? s : most;
  }
  float top = *m;
  for (int i = 0; i < V::W; i++) top = most[i] > top ? most[i] : top;
  bool has_nan = false;  // a NaN compares as not larger than anything
  for (int64_t i = from; i < to && !(top > none); i++) has_nan |= scores[i] != scores[i];
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

TARGET inline int64_t cached(const Attention& a, int64_t b) {
  const int64_t length = a.length[b];
  return length < 0 ? 0 : length < a.S ? length : a.S;
}

TARGET inline int64_t clamped(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x < high ? x : high;
}

// What a row's query sees of the KEYS places from `begin` on.
struct Seen {
  int64_t from, to;           // places it sees
  const int32_t* nodes;       // of these, the ones that are nodes, in order
  int64_t count, first_place; // of the nodes
};

TARGET inline Seen seen_by(const Attention& a, const Tile& tile, int64_t row, int64_t begin) {
  const int64_t q = tile.b * a.Tq + (tile.first + row) / (a.Hq / a.Hk);
  const int64_t first = a.first ? a.first[q] : 0, length = cached(a, tile.b);
  const int64_t root = first > length ? first : length;  // the place of its first ancestor
  const int64_t none = clamped(begin - root, 0, a.count[q]);
  const int64_t end = clamped(begin + KEYS - root, 0, a.count[q]);
  return {clamped(first - begin, 0, KEYS), clamped(root + a.count[q] - begin, 0, KEYS),
          a.ancestors + q * a.T + none, end - none, root + none - begin};
}

// Returns the values [count, hd] with zeros in place of those that contain NaN or infinity, whose
// product with the weight 0 of a key that a query does not see would be NaN. Adds these to the
// sums of the queries that see them: sees(row, s).
template <class L, class Sees>
TARGET __attribute__((noinline)) const typename L::Weight* without_faults(
    const Attention& a, const Tile& tile, const Space& space, const typename L::Weight* v,
    int64_t count, const float* weights, const Sees& sees, const Queries& to) {
  using V = Lanes;
  auto* const clean = static_cast<typename L::Weight*>(space.clean);
  bool any = false;
  for (int64_t s = 0; s < count; s++) {
    const typename L::Weight* const value = v + s * a.hd;
    V::F zeros = V::F{};
    for (int64_t i = 0; i < a.hd; i += V::W)
      zeros = V::fma(V::load(value + i, a.hd - i), V::F{}, zeros);
    if (V::sum(zeros) == 0.0f) continue;
    if (!any) __builtin_memcpy(clean, v, count * a.hd * sizeof(*v));
    any = true;
    __builtin_memset(clean + s * a.hd, 0, a.hd * sizeof(*v));
    for (int64_t r = 0; r < tile.rows(); r++) {
      if (!sees(r, s)) continue;
      const V::F weight = V::F{} + weights[r * KEYS + s];
      float* const sum = to.weighted + r * a.hd;
      for (int64_t i = 0; i < a.hd; i += V::W)
        V::store(sum + i,
                 V::fma(weight, V::load(value + i, a.hd - i), V::load(sum + i, a.hd - i)),
                 a.hd - i);
    }
  }
  return any ? clean : v;
}

// Computes the products [rows, KEYS] of the queries with `count` keys.
template <class L>
TARGET void score_keys(const Attention& a, int64_t rows, const Space& space,
                       const typename L::Weight* k, const typename L::Weight* next,
                       int64_t count, float* scores) {
  if constexpr (TileProducts<L>::exist)
    if (space.tiles) return TileProducts<L>::scores(a, k, count, rows, space, scores);
  const auto* q = static_cast<const typename L::Row*>(space.q);
  for (int64_t c = 0; c < count; c += COLUMNS) {
    const int some = static_cast<int>(count - c < COLUMNS ? count - c : COLUMNS);
    product_rows<L>(q, rounded_up(a.hd, L::step), rows, k + c * a.hd, a.hd,
                    reinterpret_cast<const char*>(next + c * a.hd), scores + c, KEYS, some);
  }
}

// Adds `count` values, times weights [rows, KEYS], to the queries' sums.
template <class L>
TARGET void add_values(const Attention& a, int64_t rows, const Space& space,
                       const typename L::Weight* v, int64_t count, const float* weights,
                       const Queries& to) {
  using V = Lanes;
  const float* values;
  if constexpr (sizeof(*v) == 2) {
    const int64_t all = count * a.hd;
    for (int64_t i = 0; i < all; i += V::W)
      V::store(space.values + i, V::load(v + i, all - i), all - i);
    values = space.values;
  } else {
    values = v;
  }
  add_product(to.weighted, weights, values, rows, count, a.hd, {a.hd, KEYS, a.hd});
}

// Adds the keys and values at the KEYS places from `begin` on. Of several queries' nodes a query
// gives those that it does not see the weight 0, which changes no sum.
template <class L>
TARGET void add_block(const Attention& a, const Tile& tile, const Space& space, int64_t begin,
                      const Queries& to) {
  using Weight = typename L::Weight;
  const int64_t rows = tile.rows(), base = (tile.b * a.Hk + tile.head) * a.S + begin;
  const int64_t count = clamped(cached(a, tile.b) - begin, 0, KEYS);  // rows of the cache
  const auto* k = static_cast<const Weight*>(a.k_cache) + base * a.hd;
  const auto* v = static_cast<const Weight*>(a.v_cache) + base * a.hd;
  const auto* const k_nodes = static_cast<const Weight*>(space.k);
  const auto* const v_nodes = static_cast<const Weight*>(space.v);
  int64_t low = a.T, high = 0;  // the nodes among the places
  bool any = false, hidden = false;
  for (int64_t r = 0; r < rows; r++) {
    const Seen seen = seen_by(a, tile, r, begin);
    any |= seen.from < seen.to, hidden |= seen.from > 0;
    if (seen.count <= 0) continue;
    low = seen.nodes[0] < low ? seen.nodes[0] : low;
    const int64_t end = seen.nodes[seen.count - 1] + 1;
    high = end > high ? end : high;
  }
  if (!any) return;
  // Calls use(scores by place, of_nodes, node) for each place of a row that is one of the nodes
  // [first, first + some).
  const auto for_nodes = [&](int64_t first, int64_t some, const auto& use) TARGET {
    for (int64_t r = 0; r < rows; r++) {
      const Seen seen = seen_by(a, tile, r, begin);
      for (int64_t i = 0; i < seen.count; i++) {
        const int64_t node = seen.nodes[i] - first;
        if (node >= 0 && node < some)
          use(space.scores[r * KEYS + seen.first_place + i], space.of_nodes[r * KEYS + node]);
      }
    }
  };
  if (count > 0) score_keys<L>(a, rows, space, k, v, count, space.scores);
  for (int64_t first = low; first < high; first += KEYS) {
    const int64_t some = high - first < KEYS ? high - first : KEYS;
    score_keys<L>(a, rows, space, k_nodes + first * a.hd, v_nodes + first * a.hd, some,
                  space.of_nodes);
    for_nodes(first, some, [](float& score, float& of_node) TARGET { score = of_node; });
  }
  for (int64_t r = 0; r < rows; r++) {
    const Seen seen = seen_by(a, tile, r, begin);
    const float kept =
        weigh(space.scores + r * KEYS, seen.from, seen.to, a.scale, to.m + r, to.l + r);
    if (kept != 1.0f)
      for (int64_t i = 0; i < a.hd; i++) to.weighted[r * a.hd + i] *= kept;
  }
  if (count > 0) {
    const auto sees = [&](int64_t r, int64_t s) TARGET {
      return s >= seen_by(a, tile, r, begin).from;
    };
    if (hidden) v = without_faults<L>(a, tile, space, v, count, space.scores, sees, to);
    add_values<L>(a, rows, space, v, count, space.scores, to);
  }
  for (int64_t first = low; first < high; first += KEYS) {
    const int64_t some = high - first < KEYS ? high - first : KEYS;
    for (int64_t i = 0; i < rows * KEYS; i++) space.of_nodes[i] = 0.0f;
    for_nodes(first, some, [](float& weight, float& of_node) TARGET { of_node = weight; });
    const Weight* values = v_nodes + first * a.hd;
    const auto sees = [&](int64_t r, int64_t s) TARGET {
      const int64_t q = tile.b * a.Tq + (tile.first + r) / (a.Hq / a.Hk);
      const Seen seen = seen_by(a, tile, r, begin);
      return a.mask[q * a.T + first + s] != 0 && seen.count > 0 && first + s >= seen.nodes[0] &&
             first + s <= seen.nodes[seen.count - 1];
    };
    if (a.T > 1)
      values = without_faults<L>(a, tile, space, values, some, space.of_nodes, sees, to);
    add_values<L>(a, rows, space, values, some, space.of_nodes, to);
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

// Computes the sums of one part of the places.
template <class L>
TARGET void one_part(const Attention& a, const Tile& tile, const Space& space,
                     int64_t part, const Queries& to) {
  reset(a, tile, to);
  const int64_t first = part * PART, end = a.places[tile.b];
  for (int64_t begin = first; begin < first + PART && begin < end; begin += KEYS)
    add_block<L>(a, tile, space, begin, to);
}

template <class L>
TARGET void attention_part(const Attention& a, void* scratch, int64_t unit,
                           int64_t part) {
  Space space;
  space_layout<L>(a, static_cast<char*>(scratch), &space);
  const Tile tile = tile_of(a, unit);
  if (tile.rows() == 0) return;
  pack_tile<L>(a, tile, space);
  one_part<L>(a, tile, space, part, part_of(a, unit, part));
}

TARGET inline void attention_merge(const Attention& a, int64_t unit) {
  const Tile tile = tile_of(a, unit);
  const Queries seen = part_of(a, unit, 0);
  for (int64_t part = 1; part < a.parts; part++) merge(a, tile, seen, part_of(a, unit, part));
  write_tile(a, tile, seen);
}

// Computes and merges all parts in one thread.
template <class L>
TARGET void attention_whole(const Attention& a, void* scratch, int64_t unit) {
  Space space;
  space_layout<L>(a, static_cast<char*>(scratch), &space);
  const Tile tile = tile_of(a, unit);
  if (tile.rows() == 0) return;
  pack_tile<L>(a, tile, space);
  one_part<L>(a, tile, space, 0, space.seen);
  for (int64_t part = 1; part < a.parts; part++) {
    one_part<L>(a, tile, space, part, space.more);
    merge(a, tile, space.seen, space.more);
  }
  write_tile(a, tile, space.seen);
}

template <class L>
constexpr AttentionKernel attention_kernel() {
  return {attention_bytes<L>, attention_part<L>, attention_merge, attention_whole<L>};
}
