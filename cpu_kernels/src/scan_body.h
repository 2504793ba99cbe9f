// The replay of the last path and the scan of this tree. Include after lanes.h.
//
// The reference implementation in JAX is `replay_tree_scan` in pallas_kernels/scan.py. A head's
// state [P, N] is read and written once: it is replayed, then multiplied by C as the weight of a
// product. A node's output sums over its ancestors in order, so it does not depend on other nodes,
// rows of the batch or threads, bit for bit.

constexpr double FORGOTTEN = -128.0;  // exp of this or less is 0: log decays are clamped to it

TARGET inline int64_t path_length(const Scan& s, int64_t b) {
  return s.length[b] < s.M ? s.length[b] : s.M;
}

// Scratch of a batch row, shared by all heads. Sizes in floats; rows are padded with zeros.
struct Shared {
  float *C, *B, *past_B;      // [G, Tq, reads, n], [G, T, n], [G, M, n]
  float* scores;              // [G, Tq, reads, T], C . B
  float *path_dt, *path_a;    // [M, H]
  float* of_queries;          // [Tq, H], a number that a mixer keeps of each query
  float *kept, *factors, *walk;  // [H, n], [H, T, n], [H, n] if decays are by column
  int32_t* ancestors;         // [T, T]; row t holds count[t] ancestors
  int32_t* count;             // [T]
};

// Scratch of a thread for one head.
struct Own {
  float *x, *carried;    // [T, p], [Tq, reads, p]
  float *weight, *past;  // weights of all nodes' ancestors; [M, P] of the path's tokens
  float *pair, *y;       // of one node: weights [2, T] by key and by query; output [p]
  double* sum;           // [T], sum of log decays along a node's path
  float* decay;          // [T], exp(sum)
};

template <class L>
TARGET int64_t shared_layout(const Scan& s, char* base, Shared* shared) {
  const int64_t T = s.T, n = rounded_up(s.N, L::step);
  Layout layout{base};
  layout.place(&shared->C, s.G * s.Tq * s.reads * n);
  layout.place(&shared->B, s.G * T * n);
  layout.place(&shared->past_B, s.G * s.M * n);
  layout.place(&shared->scores, s.G * s.Tq * s.reads * T);
  layout.place(&shared->path_dt, s.M * s.H);
  layout.place(&shared->path_a, s.M * s.H);
  layout.place(&shared->of_queries, s.Tq * s.H);
  const int64_t columns = s.a_by_column ? s.H * n : 0;
  layout.place(&shared->kept, columns);
  layout.place(&shared->factors, columns * T);
  layout.place(&shared->walk, columns);
  layout.place(&shared->ancestors, T * T);
  layout.place(&shared->count, T);
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

TARGET inline int64_t own_layout(const Scan& s, char* base, Own* own) {
  const int64_t T = s.T, p = rounded_up(s.P, 16);
  Layout layout{base};
  layout.place(&own->x, T * p);
  layout.place(&own->carried, s.Tq * s.reads * p);
  layout.place(&own->weight, s.Tq * T);
  layout.place(&own->past, s.M * s.P);
  layout.place(&own->pair, 2 * T);
  layout.place(&own->y, p);
  layout.place(&own->sum, T);
  layout.place(&own->decay, T);
  return layout.at;
}

TARGET inline int64_t own_bytes(const Scan& s) {
  Own unused;
  return own_layout(s, nullptr, &unused);
}

// Returns the row of a queried node. T or more means that the query is padding.
TARGET inline int64_t node_of(const Scan& s, int64_t query) {
  return s.rows ? s.rows[query] : query;
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

TARGET inline void find_ancestors(const Scan& s, int64_t b, const Shared& shared) {
  const int64_t T = s.T;
  for (int64_t t = 0; t < T; t++) {
    const uint8_t* mask = s.mask + (b * T + t) * T;
    int32_t* found = shared.ancestors + t * T;
    int32_t count = 0;
    for (int64_t u = 0; u < T; u++) {
      found[count] = static_cast<int32_t>(u);  // overwritten unless u is an ancestor
      count += mask[u] != 0;
    }
    shared.count[t] = count;
  }
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
    widen_row(shared.C + (g * s.Tq + q) * n, s.C, ((b * s.Tq + q) * s.G + g) * s.N, s.N,
              n, s.bf16);
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

// Computes the products of a group's C and B. If nodes come `after_ancestors`, it skips nodes that
// come after a query.
template <class L>
TARGET void score_nodes(const Scan& s, int64_t b, int64_t g, const Shared& shared,
                        bool after_ancestors) {
  const int64_t T = s.T, nodes = s.nodes[b], n = rounded_up(s.N, L::step);
  const int64_t first = g * s.Tq * s.reads, end = s.queries[b] * s.reads;
  for (int64_t u = 0; u < nodes && end > 0; u += COLUMNS) {
    const int count = static_cast<int>(nodes - u < COLUMNS ? nodes - u : COLUMNS);
    const float* B = shared.B + (g * T + u) * n;
    const int64_t from = after_ancestors && !s.rows ? u * s.reads : 0;
    product_rows<L>(shared.C + (first + from) * n, n, end - from, B, n,
                    reinterpret_cast<const char*>(B), shared.scores + (first + from) * T + u,
                    T, count);
  }
}

// Up to four rows [N] of a state, and the inputs of their replay.
struct Rows {
  const float* h0[COLUMNS];  // past the last row, the last one is repeated
  float* h[COLUMNS];
  const float* weight[COLUMNS];  // [M, P], from the row on
  const float* B;                // [M, n], of the path
  int64_t length;                // tokens of the path
  float kept;
  const float* by_column;  // [n], instead of `kept` if not null
  bool same;  // the path is empty and the state is updated in place: nothing to write
};

// Computes h = kept * h0 + sum over the path of weight * x (outer) B, and C . h for R queries.
// Reads every number of the state once for both.
template <class L, int R>
TARGET void replay_rows(const Scan& s, const Rows& rows, const float* C, Ahead& from_here,
                        float* out, int64_t stride, int count) {
  Ahead ahead = from_here;
  const int64_t n = rounded_up(s.N, L::step), whole = s.N / L::step * L::step;
  const auto factor = L::all(rows.kept);
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
      h[c] = i < whole ? L::weight(rows.h0[c] + i) : L::weight_tail(rows.h0[c] + i, left);
    if (!rows.same) {
      const auto of_column = rows.by_column ? L::row(rows.by_column + i) : factor;
#pragma GCC unroll 4
      for (int c = 0; c < COLUMNS; c++) h[c] = L::times(of_column, h[c]);
      for (int64_t j = 0; j < rows.length; j++) {
        const auto B = L::row(rows.B + j * n + i);
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; c++)
          h[c] = L::dot(h[c], L::all(rows.weight[c][j * s.P]), B);
      }
#pragma GCC unroll 4
      for (int c = 0; c < COLUMNS; c++)
        i < whole ? L::put(rows.h[c] + i, h[c]) : L::put_tail(rows.h[c] + i, h[c], left);
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

// Computes exp(sum_{i > j} a_i) dt_j x_j [M, P] for the path's tokens j. Returns exp(sum a).
TARGET inline float path_weights(const Scan& s, int64_t b, int64_t head,
                                 const Shared& shared, const Own& own) {
  float after = 0.0f;
  for (int64_t j = path_length(s, b) - 1; j >= 0; j--) {
    const int64_t row = b * s.past.capacity + s.path[b * s.M + j];
    float* weight = own.past + j * s.P;
    const float factor = exp_of(after) * shared.path_dt[j * s.H + head];
    widen_row(weight, s.past.x, (row * s.H + head) * s.P, s.P, s.P, s.x_bf16);
    for (int64_t i = 0; i < s.P; i++) weight[i] *= factor;
    after += shared.path_a[j * s.H + head];
  }
  return exp_of(after);
}

// Computes the state after the path, and its contribution to every query,
// carried [Tq, reads, p] = C . h. Prefetches the state of the next head meanwhile.
template <class L>
TARGET void replay_head(const Scan& s, int64_t b, int64_t head, int64_t next, float kept,
                        const Shared& shared, const Own& own) {
  const int64_t n = rounded_up(s.N, L::step), p = rounded_up(s.P, 16);
  const int64_t first = (b * s.H + head) * s.P, g = head / (s.H / s.G);
  const int64_t t = s.queries[b] * s.reads;
  const float* const C = shared.C + g * s.Tq * s.reads * n;
  const int64_t blocks = t ? blocks_of<L>(t) : 1, at_first = t / blocks;
  const int64_t each = (COLUMNS * s.N * 4 * L::step + blocks * n - 1) / (blocks * n);
  const int64_t bytes = next < 0 ? 0 : each;
  const float* const of_next = s.h0 + (next < 0 ? 0 : next * s.P * s.N);
  Rows rows{{}, {}, {}, shared.past_B + g * s.M * n, path_length(s, b), kept, nullptr, false};
  if (s.a_by_column) rows.by_column = shared.kept + head * n;
  rows.same = rows.length <= 0 && s.h == s.h0;
  if (rows.same && t == 0) return;
  for (int64_t i = 0; i < s.P; i += COLUMNS) {
    const int count = static_cast<int>(s.P - i < COLUMNS ? s.P - i : COLUMNS);
    for (int c = 0; c < COLUMNS; c++) {
      const int64_t row = i + (c < count ? c : count - 1);
      rows.h0[c] = s.h0 + (first + row) * s.N, rows.h[c] = s.h + (first + row) * s.N;
      rows.weight[c] = own.past + row;
    }
    Ahead next_head(reinterpret_cast<const char*>(of_next + i * s.N), bytes, false);
    float* const out = own.carried + i;
    switch (at_first) {
#define STREE_REPLAY(R)                                                       \
  case R:                                                                     \
    if constexpr (R <= L::most_rows)                                          \
      replay_rows<L, R>(s, rows, C, next_head, out, p, count);                \
    break;
      STREE_REPLAY(0)
      STREE_UP_TO_6(STREE_REPLAY)
#undef STREE_REPLAY
    }
    if (t > at_first)
      product_rows<L>(C + at_first * n, n, t - at_first, rows.h[0], s.N, s.N, next_head,
                      out + at_first * p, p, count, false);
  }
}

// Computes x = exp(x) for `size` numbers.
TARGET inline void exp_row(float* x, int64_t size) {
  using V = Lanes;
  for (int64_t i = 0; i < size; i += V::W)
    V::store(x + i, V::exp(V::load(x + i, size - i)), size - i);
}

// Copies x of all nodes.
TARGET inline void read_x(const Scan& s, int64_t b, int64_t head, const Own& own) {
  const int64_t p = rounded_up(s.P, 16);
  for (int64_t t = 0; t < s.nodes[b]; t++) {
    const int64_t from = ((b * s.now.capacity + t) * s.H + head) * s.P;
    widen_row(own.x + t * p, s.now.x, from, s.P, p, s.x_bf16);
  }
}

// Computes the decays along the paths of all nodes.
TARGET inline void sum_decays(const Scan& s, int64_t b, int64_t head, const Shared& shared,
                              const Own& own) {
  const float* a = s.now.a + b * s.now.capacity * s.H + head;
  for (int64_t t = 0; t < s.nodes[b]; t++) {
    double sum = 0.0;
    for (int32_t i = 0; i < shared.count[t]; i++) {
      const double decay = a[shared.ancestors[t * s.T + i] * s.H];
      sum += decay < FORGOTTEN ? FORGOTTEN : decay;
    }
    own.sum[t] = sum, own.decay[t] = static_cast<float>(sum);
  }
  exp_row(own.decay, s.nodes[b]);
}

// Computes exp(A_t - A_u) for the ancestors u of the queried nodes t, node after node. All
// exponentials are computed together, in full vectors.
TARGET inline void weigh_ancestors(const Scan& s, int64_t b, const Shared& shared,
                                   const Own& own) {
  float* to = own.weight;
  for (int64_t q = 0; q < s.queries[b]; q++) {
    const int64_t t = node_of(s, q);
    if (t >= s.T) continue;
    const int32_t* ancestors = shared.ancestors + t * s.T;
    for (int32_t i = 0; i < shared.count[t]; i++)
      *to++ = static_cast<float>(own.sum[t] - own.sum[ancestors[i]]);
  }
  exp_row(own.weight, to - own.weight);
}

// Computes N vectors of each of R sums, decay * carried + sum over a node's ancestors u of
// weight * x_u. `carried` has R rows, p apart, and `weight` has R rows, T apart.
template <int R, int N>
TARGET inline __attribute__((always_inline)) void add_ancestors(
    Lanes::F (&sum)[R][N], const float* carried, float decay, const float* weight, int64_t T,
    const int32_t* ancestors, int32_t count, const float* x, int64_t p) {
  using V = Lanes;
#pragma GCC unroll 2
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < N; v++) sum[r][v] = V::load(carried + r * p + v * V::W, V::W) * decay;
  for (int32_t i = 0; i < count; i++) {
    const float* const row = x + ancestors[i] * p;
#pragma GCC unroll 4
    for (int v = 0; v < N; v++) {
      const V::F one = V::load(row + v * V::W, V::W);
#pragma GCC unroll 2
      for (int r = 0; r < R; r++)
        sum[r][v] = V::fma(V::F{} + weight[r * T + i], one, sum[r][v]);
    }
  }
}

// y_t = exp(A_t) carried_t + sum over ancestors u of exp(A_t - A_u) dt_u (C_t . B_u) x_u
//       + D x_t
TARGET inline void write_outputs(const Scan& s, int64_t b, int64_t head,
                                 const Shared& shared, const Own& own) {
  using V = Lanes;
  const int64_t T = s.T, p = rounded_up(s.P, 16), g = head / (s.H / s.G);
  const int64_t width = rounded_up(s.P, V::W);
  const float* dt = s.now.dt + b * s.now.capacity * s.H + head;
  const float* D = s.D + (s.D_by_channel ? head * s.P : head);
  weigh_ancestors(s, b, shared, own);
  float* weight = own.weight;
  for (int64_t q = 0; q < s.queries[b]; q++) {
    const int64_t t = node_of(s, q);
    float* y = s.y + ((b * s.Tq + q) * s.H + head) * s.P;
    if (t >= T) {
      for (int64_t j = 0; j < s.P; j++) y[j] = 0.0f;
      continue;
    }
    const float* scores = shared.scores + (g * s.Tq + q) * T;
    const int32_t* ancestors = shared.ancestors + t * T;
    const int32_t count = shared.count[t];
    for (int32_t i = 0; i < count; i++) {
      const int32_t u = ancestors[i];
      weight[i] *= dt[u * s.H] * scores[u];
    }
    const float* const x = own.x + t * p;
    const auto outputs = [&](int64_t j, auto& sum) TARGET {
      add_ancestors(sum, own.carried + q * p + j, own.decay[t], weight, T, ancestors, count,
                    own.x + j, p);
      for (auto& of : sum[0]) {
        const V::F factor = s.D_by_channel ? V::load(D + j, s.P - j) : V::F{} + *D;
        V::store(y + j, V::fma(factor, V::load(x + j, V::W), of), s.P - j);
        j += V::W;
      }
    };
    int64_t j = 0;
    for (V::F sum[1][4]; j + 4 * V::W <= width; j += 4 * V::W) outputs(j, sum);
    for (V::F sum[1][1]; j < width; j += V::W) outputs(j, sum);
    weight += count;
  }
}

// Prepares what the heads of a group read. The first group also prepares what all groups share.
template <class L>
TARGET void scan_group(const Scan& s, void* base, int64_t b, int64_t g) {
  const Shared shared = shared_of<L>(s, base, b);
  if (g == 0) {
    find_ancestors(s, b, shared);
    read_steps(s, b, s.past.dt, shared.path_dt);
    read_steps(s, b, s.past.a, shared.path_a);
  }
  read_path<L>(s, b, g, shared);
  read_C<L>(s, b, g, shared);
  read_B<L>(s, b, g, shared);
  score_nodes<L>(s, b, g, shared, false);
}

template <class L>
TARGET void scan_head(const Scan& s, void* base, void* scratch, int64_t place, int64_t next) {
  const int64_t b = place / s.H, head = place % s.H;
  const Shared shared = shared_of<L>(s, base, b);
  Own own;
  own_layout(s, static_cast<char*>(scratch), &own);
  const float kept = path_weights(s, b, head, shared, own);
  replay_head<L>(s, b, head, next, kept, shared, own);
  read_x(s, b, head, own);
  sum_decays(s, b, head, shared, own);
  write_outputs(s, b, head, shared, own);
}

template <class L>
constexpr ScanKernel scan_kernel() {
  return {shared_bytes<L>, own_bytes, scan_group<L>, scan_head<L>};
}
