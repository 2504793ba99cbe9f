// The replay of the last path and the scan of this tree; after product_body.h.
//
// What is computed is defined by pallas_kernels/scan.py, replay_tree_scan. A head's state
// [P, N] is read and written once: replayed, then multiplied by C as a product whose
// weight it is. A node's output sums over its ancestors in their order, so that it knows
// nothing of other nodes, rows of the batch or threads.

constexpr double FORGOTTEN = -128.0;  // log decays below are no different: exp is 0

// exp, within 2 units in the last place; what is below 2^-126 may be 0.
TARGET inline float exp_of(float x) {
  const float bounded = x < -110.0f ? -110.0f : x > 100.0f ? 100.0f : x;
  const float shifted = bounded * 1.44269504f + 12582912.0f;  // 1.5 * 2^23
  const float n = shifted - 12582912.0f;
  const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;  // the minimax polynomial of Cephes' expf
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  uint32_t bits;
  __builtin_memcpy(&bits, &shifted, 4);
  const uint32_t power = bits - 0x4B400000u;  // n, as an integer
  const auto half = static_cast<uint32_t>(static_cast<int32_t>(power) >> 1);
  const uint32_t first = (half + 127u) << 23, second = (power - half + 127u) << 23;
  float low, high;  // 2^n as two factors, either of which is a normal number
  __builtin_memcpy(&low, &first, 4);
  __builtin_memcpy(&high, &second, 4);
  return y * low * high;
}

TARGET inline int64_t path_length(const Scan& s, int64_t b) {
  return s.length[b] < s.M ? s.length[b] : s.M;
}

// What a thread needs besides; sizes in floats, rows padded with zeros.
struct Scratch {
  float *C, *B, *past_B;  // [T, n], [T, n], [M, n]
  float *scores;          // [T, T], C . B of a group
  float *x, *carried;     // [T, p]
  float *weight, *past;   // [T] of a node's ancestors; [M, P] of a path's tokens
  double* sum;            // [T], log decays along a node's path
  int32_t* ancestors;     // [T, T], of which a node has `count`
  int32_t* count;         // [T]
};

template <class L>
TARGET int64_t scan_layout(const Scan& s, char* base, Scratch* scratch) {
  const int64_t T = s.now.count, n = rounded_up(s.N, L::step), p = rounded_up(s.P, 16);
  int64_t at = 0;
  float** const parts[] = {&scratch->C,      &scratch->B, &scratch->past_B,
                           &scratch->scores, &scratch->x, &scratch->carried,
                           &scratch->weight, &scratch->past};
  const int64_t sizes[] = {T * n, T * n, s.M * n, T * T, T * p, T * p, T, s.M * s.P};
  for (int i = 0; i < 8; i++) {
    *parts[i] = reinterpret_cast<float*>(base + at);
    at += rounded_up(4 * sizes[i], 64);
  }
  scratch->sum = reinterpret_cast<double*>(base + at);
  at += rounded_up(8 * T, 64);
  scratch->ancestors = reinterpret_cast<int32_t*>(base + at);
  at += rounded_up(4 * T * T, 64);
  scratch->count = reinterpret_cast<int32_t*>(base + at);
  return at + rounded_up(4 * T, 64);
}

template <class L>
TARGET int64_t scan_scratch_bytes(const Scan& s) {
  Scratch unused;
  return scan_layout<L>(s, nullptr, &unused);
}

// to [padded] = from [size] in float32, and zeros; `from` counts elements.
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

TARGET inline void find_ancestors(const Scan& s, int64_t b, const Scratch& scratch) {
  const int64_t T = s.now.count;
  for (int64_t t = 0; t < T; t++) {
    const uint8_t* mask = s.mask + (b * T + t) * T;
    int32_t* found = scratch.ancestors + t * T;
    int32_t count = 0;
    for (int64_t u = 0; u < T; u++) {
      found[count] = static_cast<int32_t>(u);  // stays if it is one
      count += mask[u] != 0;
    }
    scratch.count[t] = count;
  }
}

// C and B of a group, and the products of all of them.
template <class L>
TARGET void read_group(const Scan& s, int64_t b, int64_t g, const Scratch& scratch) {
  const int64_t T = s.now.count, n = rounded_up(s.N, L::step);
  for (int64_t t = 0; t < T; t++) {
    const int64_t at = ((b * T + t) * s.G + g) * s.N;
    widen_row(scratch.C + t * n, s.C, at, s.N, n, s.bf16);
    widen_row(scratch.B + t * n, s.now.B, at, s.N, n, s.bf16);
  }
  for (int64_t j = 0; j < path_length(s, b); j++) {
    const int64_t row = b * s.past.count + s.path[b * s.M + j];
    widen_row(scratch.past_B + j * n, s.past.B, (row * s.G + g) * s.N, s.N, n, s.bf16);
  }
  for (int64_t u = 0; u < T; u += COLUMNS) {
    const int count = static_cast<int>(T - u < COLUMNS ? T - u : COLUMNS);
    const float* B = scratch.B + u * n;
    product_rows<L>(scratch.C, n, T, B, n, reinterpret_cast<const char*>(B),
                    scratch.scores + u, T, count);
  }
}

// h = kept * h0 + sum over the path of weight * x (outer) B, of one row [N] of a state.
template <class L>
TARGET inline void replay_row(const Scan& s, const float* h0, float* h, float kept,
                              const float* weight, int64_t length, const float* B) {
  const int64_t n = rounded_up(s.N, L::step), whole = s.N / L::step * L::step;
  const auto factor = L::all(kept);
  for (int64_t i = 0; i < n; i += L::step) {
    const int count = static_cast<int>(s.N - i);
    auto sum = L::times(factor, i < whole ? L::weight(h0 + i)
                                          : L::weight_tail(h0 + i, count));
    for (int64_t j = 0; j < length; j++)
      sum = L::dot(sum, L::all(weight[j * s.P]), L::row(B + j * n + i));
    if (i < whole)
      L::put(h + i, sum);
    else
      L::put_tail(h + i, sum, count);
  }
}

// Of the path's tokens j: exp(sum_{i > j} a_i) dt_j x_j [M, P]. Returns exp(sum a).
TARGET inline float path_weights(const Scan& s, int64_t b, int64_t head,
                                 const Scratch& scratch) {
  float after = 0.0f;
  for (int64_t j = path_length(s, b) - 1; j >= 0; j--) {
    const int64_t row = b * s.past.count + s.path[b * s.M + j];
    float* weight = scratch.past + j * s.P;
    const float factor = exp_of(after) * s.past.dt[row * s.H + head];
    widen_row(weight, s.past.x, (row * s.H + head) * s.P, s.P, s.P, s.bf16);
    for (int64_t i = 0; i < s.P; i++) weight[i] *= factor;
    after += s.past.a[row * s.H + head];
  }
  return exp_of(after);
}

// The state after the path, and what it gives every node: carried [T, p] = C . h.
template <class L>
TARGET void replay_head(const Scan& s, int64_t b, int64_t head, const Scratch& scratch) {
  const int64_t T = s.now.count, n = rounded_up(s.N, L::step), p = rounded_up(s.P, 16);
  const int64_t first = (b * s.H + head) * s.P;
  const float kept = path_weights(s, b, head, scratch);
  const bool same = path_length(s, b) <= 0 && s.h == s.h0;
  for (int64_t i = 0; i < s.P; i += COLUMNS) {
    const int count = static_cast<int>(s.P - i < COLUMNS ? s.P - i : COLUMNS);
    const float* h0 = s.h0 + (first + i) * s.N;
    float* h = s.h + (first + i) * s.N;
    if (!same)
      for (int c = 0; c < count; c++)
        replay_row<L>(s, h0 + c * s.N, h + c * s.N, kept, scratch.past + i + c,
                      path_length(s, b), scratch.past_B);
    const auto* next_head = reinterpret_cast<const char*>(h0 + s.P * s.N);
    product_rows<L>(scratch.C, n, T, h, s.N, next_head, scratch.carried + i, p, count);
  }
}

// y_t = exp(A_t) carried_t + sum over ancestors u of exp(A_t - A_u) dt_u (C_t . B_u) x_u
//       + D x_t
TARGET inline void write_outputs(const Scan& s, int64_t b, int64_t head,
                                 const Scratch& scratch) {
  const int64_t T = s.now.count, p = rounded_up(s.P, 16);
  const float* dt = s.now.dt + b * T * s.H + head;
  const float* a = s.now.a + b * T * s.H + head;
  for (int64_t t = 0; t < T; t++) {
    widen_row(scratch.x + t * p, s.now.x, ((b * T + t) * s.H + head) * s.P, s.P, p,
              s.bf16);
    double sum = 0.0;
    for (int32_t i = 0; i < scratch.count[t]; i++) {
      const double decay = a[scratch.ancestors[t * T + i] * s.H];
      sum += decay < FORGOTTEN ? FORGOTTEN : decay;
    }
    scratch.sum[t] = sum;
  }
  const float* D = s.D + (s.D_by_channel ? head * s.P : head);
  for (int64_t t = 0; t < T; t++) {
    const int32_t* ancestors = scratch.ancestors + t * T;
    const int32_t count = scratch.count[t];
    for (int32_t i = 0; i < count; i++)
      scratch.weight[i] = static_cast<float>(scratch.sum[t] - scratch.sum[ancestors[i]]);
    for (int32_t i = 0; i < count; i++) scratch.weight[i] = exp_of(scratch.weight[i]);
    for (int32_t i = 0; i < count; i++) {
      const int32_t u = ancestors[i];
      scratch.weight[i] *= dt[u * s.H] * scratch.scores[t * T + u];
    }
    float* y = s.y + ((b * T + t) * s.H + head) * s.P;
    float* total = scratch.carried + t * p;
    const float decay = exp_of(static_cast<float>(scratch.sum[t]));
    for (int64_t j = 0; j < p; j += 16) {
      float part[16];
      for (int c = 0; c < 16; c++) part[c] = decay * total[j + c];
      for (int32_t i = 0; i < count; i++) {
        const float* x = scratch.x + ancestors[i] * p + j;
        for (int c = 0; c < 16; c++) part[c] += scratch.weight[i] * x[c];
      }
      for (int c = 0; c < 16; c++) total[j + c] = part[c];
    }
    const float* x = scratch.x + t * p;
    for (int64_t j = 0; j < s.P; j++)
      y[j] = total[j] + D[s.D_by_channel ? j : 0] * x[j];
  }
}

template <class L>
TARGET void scan_heads(const Scan& s, void* base, int64_t begin, int64_t end) {
  Scratch scratch;
  scan_layout<L>(s, static_cast<char*>(base), &scratch);
  int64_t row = -1, group = -1;
  for (int64_t i = begin; i < end; i++) {
    const int64_t b = i / s.H, head = i % s.H, g = head / (s.H / s.G);
    if (b != row) find_ancestors(s, b, scratch);
    if (b != row || g != group) read_group<L>(s, b, g, scratch);
    row = b, group = g;
    replay_head<L>(s, b, head, scratch);
    write_outputs(s, b, head, scratch);
  }
}

template <class L>
constexpr ScanKernel scan_kernel() {
  return {scan_scratch_bytes<L>, scan_heads<L>};
}
