// The replay of the last path and the scan of this tree. Include after lanes.h.
//
// The reference implementation in JAX is `replay_tree_scan` in pallas_kernels/scan.py. Here states
// are computed token by token, h_t = exp(a_t) h_parent + (dt_t x_t) (outer) B_t, whether a token
// belongs to the path or is a node with children. A node's output is computed from its parent's
// state. So the result of a node depends on its text alone, bit for bit: not on other nodes, on
// which tokens were read together, on rows of the batch or on threads.
//
// The rows of a head's state do not mix. Four of them are replayed and then walk the whole tree
// in the innermost cache; the state in memory is read and written once.

TARGET inline int64_t path_length(const Scan& s, int64_t b) {
  return s.length[b] < s.M ? s.length[b] : s.M;
}

// Scratch of a batch row, shared by all heads. Sizes in floats; rows are padded with zeros.
// Queries are in the order of `Scan::order`.
struct Shared {
  float *C, *B, *past_B;            // [G, Tq, reads, n], [G, T, n], [G, M, n]
  float* scores;                    // [G, Tq], C . B of each query (the last of its `reads`)
  float *path_dt, *path_a;          // [M, H]
  float* of_queries;                // [Tq, H], a number that a mixer keeps of each query
  float *path_factors, *factors;    // decays by column: [H, M, n], [H, T, n]
};

// Scratch of a thread for one head.
struct Own {
  float *x, *carried;        // [T, p], what nodes add to the state; [Tq, reads, p]
  float* past;               // [M, P], what the path's tokens add
  float *decay, *past_decay; // [T], [M]
  float* states;             // [slots, COLUMNS, n], rows of the nodes' states
  float* y;                  // [p]
};

template <class L>
TARGET int64_t shared_layout(const Scan& s, char* base, Shared* shared) {
  const int64_t T = s.T, n = rounded_up(s.N, L::step);
  Layout layout{base};
  layout.place(&shared->C, s.G * s.Tq * s.reads * n);
  layout.place(&shared->B, s.G * T * n);
  layout.place(&shared->past_B, s.G * s.M * n);
  layout.place(&shared->scores, s.G * s.Tq);
  layout.place(&shared->path_dt, s.M * s.H);
  layout.place(&shared->path_a, s.M * s.H);
  layout.place(&shared->of_queries, s.Tq * s.H);
  const int64_t columns = s.a_by_column ? s.H * n : 0;
  layout.place(&shared->path_factors, columns * s.M);
  layout.place(&shared->factors, columns * T);
  return layout.at;
}

template <class L>
TARGET Shared shared_of(const Scan& s, void* base, int64_t b) {
  Shared shared;
  const int64_t bytes = shared_layout<L>(s, nullptr, &shared);
  shared_layout<L>(s, static_cast<char*>(base) + b * bytes, &shared);
  return shared;
}

template <class L>
TARGET int64_t shared_bytes(const Scan& s) {
  Shared unused;
  return s.batch * shared_layout<L>(s, nullptr, &unused);
}

template <class L>
TARGET int64_t own_layout(const Scan& s, char* base, Own* own) {
  const int64_t T = s.T, p = rounded_up(s.P, 16);
  Layout layout{base};
  layout.place(&own->x, T * p);
  layout.place(&own->carried, s.Tq * s.reads * p);
  layout.place(&own->past, s.M * s.P);
  layout.place(&own->decay, T);
  layout.place(&own->past_decay, s.M);
  layout.place(&own->states, s.slots * COLUMNS * rounded_up(s.N, L::step));
  layout.place(&own->y, p);
  return layout.at;
}

template <class L>
TARGET int64_t own_bytes(const Scan& s) {
  Own unused;
  return own_layout<L>(s, nullptr, &unused);
}

// Returns the row of a queried node. T or more means that the query is padding.
TARGET inline int64_t node_of(const Scan& s, int64_t query) {
  return s.rows ? s.rows[query] : query;
}

// Returns the place of a query in scratch.
TARGET inline int64_t place_of(const Scan& s, int64_t b, int64_t query) {
  return s.place[b * s.Tq + query];
}

// Copies `size` numbers from element `from` of an array, in float32, and pads with zeros.
TARGET inline void widen_row(float* to, const void* array, int64_t from, int64_t size,
                             int64_t padded, bool bf16) {
  if (bf16) {
    const uint16_t* values = static_cast<const uint16_t*>(array) + from;
    for (int64_t i = 0; i < size; i++) to[i] = widened(values[i]);
  } else {
    const float* values = static_cast<const float*>(array) + from;
    for (int64_t i = 0; i < size; i++) to[i] = values[i];
  }
  for (int64_t i = size; i < padded; i++) to[i] = 0.0f;
}

// Copies the path's rows of an array [B, capacity, H] of the last tree, such as dt or a. This tree
// may overwrite the array afterwards.
TARGET inline void read_steps(const Scan& s, int64_t b, const float* from, float* to) {
  for (int64_t j = 0; j < path_length(s, b); j++) {
    const int64_t row = b * s.past.capacity + s.path[b * s.M + j];
    for (int64_t h = 0; h < s.H; h++) to[j * s.H + h] = from[row * s.H + h];
  }
}

// Copies a group's B of the path.
template <class L>
TARGET void read_path(const Scan& s, int64_t b, int64_t g, const Shared& shared) {
  const int64_t n = rounded_up(s.N, L::step);
  float* to = shared.past_B + g * s.M * n;
  for (int64_t j = 0; j < path_length(s, b); j++) {
    const int64_t row = b * s.past.capacity + s.path[b * s.M + j];
    widen_row(to + j * n, s.past.B, (row * s.G + g) * s.N, s.N, n, s.bf16);
  }
}

template <class L>
TARGET void read_C(const Scan& s, int64_t b, int64_t g, const Shared& shared) {
  const int64_t n = rounded_up(s.N, L::step);
  for (int64_t q = 0; q < s.queries[b]; q++)
    widen_row(shared.C + (g * s.Tq + place_of(s, b, q)) * n, s.C,
              ((b * s.Tq + q) * s.G + g) * s.N, s.N, n, s.bf16);
}

// Copies a group's B of all nodes.
template <class L>
TARGET void read_B(const Scan& s, int64_t b, int64_t g, const Shared& shared) {
  const int64_t n = rounded_up(s.N, L::step);
  float* rows = shared.B + g * s.T * n;
  for (int64_t t = 0; t < s.nodes[b]; t++)
    widen_row(rows + t * n, s.now.B, ((b * s.now.capacity + t) * s.G + g) * s.N, s.N, n,
              s.bf16);
}

// Computes the product of each query's C and B, of the last C if it has several.
template <class L>
TARGET void score_queries(const Scan& s, int64_t b, int64_t g, const Shared& shared) {
  using V = Lanes;
  const int64_t n = rounded_up(s.N, L::step);
  for (int64_t q = 0; q < s.queries[b]; q++) {
    const int64_t t = node_of(s, q), place = place_of(s, b, q);
    if (t >= s.T) continue;
    const float* const B = shared.B + (g * s.T + t) * n;
    const float* const C = shared.C + ((g * s.Tq + place + 1) * s.reads - 1) * n;
    V::F sum = V::F{};
    for (int64_t i = 0; i < n; i += V::W)
      sum = V::fma(V::load(C + i, V::W), V::load(B + i, V::W), sum);
    shared.scores[g * s.Tq + place] = V::sum(sum);
  }
}

// Up to four rows of a state, and tokens that are added to it one after another. Rows are [N]
// in memory and [n] in scratch.
struct Rows {
  const float* h0[COLUMNS];  // past the last row, the last one is repeated
  float* h[COLUMNS];         // may be h0
  const float* added[COLUMNS];  // of the first token
  int64_t apart;                // of the tokens in `added`
  const float *B, *decay;       // [length, n], [length]
  const float* factors;         // [length, n], instead of `decay` if not null
  int64_t length;
  bool from_memory, to_memory;
  bool same;  // h0 is h and there are no tokens: nothing to write
};

// Computes h = decay h + added (outer) B for each token, and C . h for R queries. Reads and writes
// every number of the state once.
template <class L, int R>
TARGET void replay_rows(const Scan& s, const Rows& rows, const float* C, Ahead& from_here,
                        float* out, int64_t stride, int count) {
  Ahead ahead = from_here;
  const int64_t n = rounded_up(s.N, L::step), whole = s.N / L::step * L::step;
  const int64_t read = rows.from_memory ? whole : n, written = rows.to_memory ? whole : n;
  typename L::Sum sum[R ? R : 1][COLUMNS];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < COLUMNS; c++) sum[r][c] = L::zero();
  for (int64_t i = 0; i < n; i += L::step) {
    const int left = static_cast<int>(s.N - i);
    ahead.fetch();
    typename L::Loaded h[COLUMNS];
#pragma GCC unroll 4
    for (int c = 0; c < COLUMNS; c++)
      h[c] = i < read ? L::weight(rows.h0[c] + i) : L::weight_tail(rows.h0[c] + i, left);
    if (!rows.same) {
      for (int64_t j = 0; j < rows.length; j++) {
        const auto B = L::row(rows.B + j * n + i);
        const auto kept =
            rows.factors ? L::row(rows.factors + j * n + i) : L::all(rows.decay[j]);
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; c++)
          h[c] = L::dot(L::times(kept, h[c]), L::all(rows.added[c][j * rows.apart]), B);
      }
#pragma GCC unroll 4
      for (int c = 0; c < COLUMNS; c++)
        i < written ? L::put(rows.h[c] + i, h[c]) : L::put_tail(rows.h[c] + i, h[c], left);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const auto x = L::row(C + r * n + i);
#pragma GCC unroll 4
      for (int c = 0; c < COLUMNS; c++) sum[r][c] = L::dot(sum[r][c], h[c], x);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) L::store(out + r * stride, sum[r], count);
  from_here = ahead;
}

// Computes the rows after their tokens, and their products with `t` vectors C,
// out[r * stride + c].
template <class L>
TARGET void add_tokens(const Scan& s, const Rows& rows, const float* C, int64_t t, Ahead& ahead,
                       float* out, int64_t stride, int count) {
  const int64_t n = rounded_up(s.N, L::step);
  const int64_t at_first = t ? t / blocks_of<L>(t) : 0;
  switch (at_first) {
#define STREE_REPLAY(R)                                                       \
  case R:                                                                     \
    if constexpr (R <= L::most_rows)                                          \
      replay_rows<L, R>(s, rows, C, ahead, out, stride, count);               \
    break;
    STREE_REPLAY(0)
    STREE_UP_TO_6(STREE_REPLAY)
#undef STREE_REPLAY
  }
  if (t > at_first)
    product_rows<L>(C + at_first * n, n, t - at_first, rows.h[0], rows.to_memory ? s.N : n,
                    rows.to_memory ? s.N : n, ahead, out + at_first * stride, stride, count, false);
}

// Computes x = exp(x) for `size` numbers.
TARGET inline void exp_row(float* x, int64_t size) {
  using V = Lanes;
  for (int64_t i = 0; i < size; i += V::W)
    V::store(x + i, V::exp(V::load(x + i, size - i)), size - i);
}

// Computes how much of every column of a head's state each token of the path keeps.
template <class L>
TARGET void read_path_factors(const Scan& s, int64_t b, int64_t head, const Shared& shared) {
  using V = Lanes;
  const int64_t n = rounded_up(s.N, L::step);
  for (int64_t j = 0; j < path_length(s, b); j++) {
    const int64_t row = b * s.past.capacity + s.path[b * s.M + j];
    const float* const a = s.past.a + (row * s.H + head) * s.N;
    float* const to = shared.path_factors + (head * s.M + j) * n;
    for (int64_t i = 0; i < n; i += V::W)
      V::store(to + i, i < s.N ? V::exp(V::load(a + i, s.N - i)) : V::F{}, V::W);
  }
}

// Computes what the path's tokens add to a head's state, dt_j x_j [M, P], and their decays.
TARGET inline void read_past(const Scan& s, int64_t b, int64_t head, const Shared& shared,
                             const Own& own) {
  const int64_t length = path_length(s, b);
  for (int64_t j = 0; j < length; j++) {
    const int64_t row = b * s.past.capacity + s.path[b * s.M + j];
    float* const added = own.past + j * s.P;
    widen_row(added, s.past.x, (row * s.H + head) * s.P, s.P, s.P, s.x_bf16);
    const float dt = shared.path_dt[j * s.H + head];
    for (int64_t i = 0; i < s.P; i++) added[i] *= dt;
    if (!s.a_by_column) own.past_decay[j] = shared.path_a[j * s.H + head];
  }
  if (!s.a_by_column) exp_row(own.past_decay, length);
}

// Computes the state after the path; for every query the product of C and its parent's state,
// carried [Tq, reads, p]; and the states of nodes with children. Calls settle(first, end, i) when
// `carried` of the queries at places [first, end) is known for rows i to i + 3; it may change what
// these nodes add to the state. Prefetches the state of the next head meanwhile.
template <class L, class Settle>
TARGET inline __attribute__((always_inline)) void walk_head(
    const Scan& s, int64_t b, int64_t head, int64_t next, const Shared& shared, const Own& own,
    const Settle& settle) {
  const int64_t n = rounded_up(s.N, L::step), p = rounded_up(s.P, 16), T = s.T;
  const int64_t first = (b * s.H + head) * s.P, g = head / (s.H / s.G), apart = s.reads * p;
  const float* const C = shared.C + g * s.Tq * s.reads * n;
  const float* const B = shared.B + g * T * n;
  const int32_t* const children = s.children + b * (T + 2);  // of the committed text, then by node
  const int64_t blocks = children[1] > 0 ? blocks_of<L>(children[1] * s.reads) : 1;
  const int64_t bytes =
      next < 0 ? 0 : (COLUMNS * s.N * 4 * L::step + blocks * n - 1) / (blocks * n);
  const float* const of_next = s.h0 + (next < 0 ? 0 : next * s.P * s.N);
  Rows path{{}, {}, {}, s.P, shared.past_B + g * s.M * n, own.past_decay, nullptr,
            path_length(s, b), true, true, false};
  if (s.a_by_column) path.factors = shared.path_factors + head * s.M * n;
  path.same = path.length <= 0 && s.h == s.h0;
  if (path.same && s.queries[b] == 0) return;
  for (int64_t i = 0; i < s.P; i += COLUMNS) {
    const int count = static_cast<int>(s.P - i < COLUMNS ? s.P - i : COLUMNS);
    int64_t row[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) {
      row[c] = i + (c < count ? c : count - 1);
      path.h0[c] = s.h0 + (first + row[c]) * s.N, path.h[c] = s.h + (first + row[c]) * s.N;
      path.added[c] = own.past + row[c];
    }
    Ahead next_head(reinterpret_cast<const char*>(of_next + i * s.N), bytes, false);
    add_tokens<L>(s, path, C, children[1] * s.reads, next_head, own.carried + i, p, count);
    settle(0, children[1], i);
    for (int64_t t = 0; t < s.nodes[b]; t++) {
      const int32_t slot = s.slot[b * T + t], parent = s.parents[b * T + t];
      if (slot < 0) continue;
      const int32_t from = children[t + 1], end = children[t + 2];
      Rows node{{}, {}, {}, 0, B + t * n, own.decay + t, nullptr, 1, parent < 0, false, false};
      if (s.a_by_column) node.factors = shared.factors + (head * T + t) * n;
      const float* const before =
          parent < 0 ? nullptr : own.states + s.slot[b * T + parent] * COLUMNS * n;
      for (int c = 0; c < COLUMNS; c++) {
        node.h0[c] = parent < 0 ? path.h[c] : before + c * n;
        node.h[c] = own.states + (slot * COLUMNS + c) * n;
        node.added[c] = own.x + t * p + row[c];
      }
      Ahead nothing(nullptr, 0, false);
      add_tokens<L>(s, node, C + from * s.reads * n, (end - from) * s.reads, nothing,
                    own.carried + from * apart + i, p, count);
      settle(from, end, i);
    }
  }
}

// Copies x of all nodes.
TARGET inline void read_x(const Scan& s, int64_t b, int64_t head, const Own& own) {
  const int64_t p = rounded_up(s.P, 16);
  for (int64_t t = 0; t < s.nodes[b]; t++) {
    const int64_t from = ((b * s.now.capacity + t) * s.H + head) * s.P;
    widen_row(own.x + t * p, s.now.x, from, s.P, p, s.x_bf16);
  }
}

// Computes the decays of all nodes.
TARGET inline void read_decays(const Scan& s, int64_t b, int64_t head, const Own& own) {
  const float* a = s.now.a + b * s.now.capacity * s.H + head;
  for (int64_t t = 0; t < s.nodes[b]; t++) own.decay[t] = a[t * s.H];
  exp_row(own.decay, s.nodes[b]);
}

// y_t = exp(a_t) (C_t . h_parent) + (C_t . B_t) dt_t x_t + D x_t
template <class L>
TARGET void scan_nodes(const Scan& s, int64_t b, int64_t head, int64_t next, const Shared& shared,
                       const Own& own) {
  using V = Lanes;
  const int64_t p = rounded_up(s.P, 16), g = head / (s.H / s.G);
  const float* const dt = s.now.dt + b * s.now.capacity * s.H + head;
  const float* const D = s.D + (s.D_by_channel ? head * s.P : head);
  read_x(s, b, head, own);
  read_decays(s, b, head, own);
  for (int64_t t = 0; t < s.nodes[b]; t++)
    for (int64_t j = 0; j < p; j += V::W)
      V::store(own.x + t * p + j, V::load(own.x + t * p + j, V::W) * dt[t * s.H], V::W);
  walk_head<L>(s, b, head, next, shared, own, [](int64_t, int64_t, int64_t) {});
  for (int64_t q = 0; q < s.queries[b]; q++) {
    const int64_t t = node_of(s, q), place = place_of(s, b, q);
    float* const y = s.y + ((b * s.Tq + q) * s.H + head) * s.P;
    if (t >= s.T) {
      for (int64_t j = 0; j < s.P; j++) y[j] = 0.0f;
      continue;
    }
    const float* const carried = own.carried + place * p;
    const V::F score = V::F{} + shared.scores[g * s.Tq + place], decay = V::F{} + own.decay[t];
    widen_row(own.y, s.now.x, ((b * s.now.capacity + t) * s.H + head) * s.P, s.P, p, s.x_bf16);
    for (int64_t j = 0; j < s.P; j += V::W) {
      const V::F factor = s.D_by_channel ? V::load(D + j, s.P - j) : V::F{} + *D;
      const V::F state = V::fma(score, V::load(own.x + t * p + j, V::W),
                                decay * V::load(carried + j, V::W));
      V::store(y + j, V::fma(factor, V::load(own.y + j, V::W), state), s.P - j);
    }
  }
}

// Prepares what the heads of a group read. The first group also prepares what all groups share.
template <class L>
TARGET void scan_group(const Scan& s, void* base, int64_t b, int64_t g) {
  const Shared shared = shared_of<L>(s, base, b);
  if (g == 0) {
    read_steps(s, b, s.past.dt, shared.path_dt);
    if (!s.a_by_column) read_steps(s, b, s.past.a, shared.path_a);
  }
  if (s.a_by_column) read_path_factors<L>(s, b, g, shared);
  read_path<L>(s, b, g, shared);
  read_C<L>(s, b, g, shared);
  read_B<L>(s, b, g, shared);
  score_queries<L>(s, b, g, shared);
}

template <class L>
TARGET void scan_head(const Scan& s, void* base, void* scratch, int64_t place, int64_t next) {
  const int64_t b = place / s.H, head = place % s.H;
  Own own;
  own_layout<L>(s, static_cast<char*>(scratch), &own);
  const Shared shared = shared_of<L>(s, base, b);
  read_past(s, b, head, shared, own);
  scan_nodes<L>(s, b, head, next, shared, own);
}

template <class L>
constexpr ScanKernel scan_kernel() {
  return {shared_bytes<L>, own_bytes<L>, scan_group<L>, scan_head<L>};
}
