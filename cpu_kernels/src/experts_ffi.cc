// XLA handlers for products of rows with the matrices of the experts that they chose.
//
// Rows are sorted by expert, so that the matrix of a chosen expert is read once per 64 rows, and
// the matrices of other experts are not read at all.
#include <vector>

#include "levels.h"
#include "panels.h"
#include "product_work.h"

namespace ffi = xla::ffi;

namespace stree {
namespace {

constexpr int64_t ROWS_AT_ONCE = 4096;
constexpr int64_t ROW_COST = 8;  // reading a weight takes about as long as so many rows

// Matrices [m, k] of equal storage. Result row i is the product of input row i / repeats with the
// matrix of expert chosen[i]; it is not written if there is no such expert.
struct Experts {
  const ProductKernel& kernel;
  Product one;             // the product with the first matrix; t is the number of results
  int64_t count, bytes;    // number of matrices, and bytes of each
  const int32_t* chosen;
  int64_t repeats;
};

// Up to MAX_ROWS results of one expert.
struct Group {
  Product p;
  const int64_t* place;  // the results
  char* packed;
  float* out;            // if not null, results are copied from here to their places
};

// Returns the results sorted by expert, and their number by expert.
std::vector<int64_t> sorted(const Experts& e, std::vector<int64_t>& counts) {
  counts.assign(e.count, 0);
  const auto valid = [&](int64_t i) { return e.chosen[i] >= 0 && e.chosen[i] < e.count; };
  for (int64_t i = 0; i < e.one.t; i++)
    if (valid(i)) counts[e.chosen[i]]++;
  std::vector<int64_t> begin(e.count + 1, 0);
  for (int64_t x = 0; x < e.count; x++) begin[x + 1] = begin[x] + counts[x];
  std::vector<int64_t> order(begin[e.count]);
  for (int64_t i = 0; i < e.one.t; i++)
    if (valid(i)) order[begin[e.chosen[i]]++] = i;
  return order;
}

// Divides the results into groups.
std::vector<Group> groups_of(const Experts& e, const std::vector<int64_t>& order,
                             const std::vector<int64_t>& counts) {
  std::vector<Group> groups;
  int64_t first = 0;
  for (int64_t x = 0; x < e.count; x++)
    for (int64_t rest = counts[x]; rest > 0; rest -= MAX_ROWS) {
      Product p = e.one;
      p.t = std::min(rest, MAX_ROWS);
      p.weight = static_cast<const char*>(e.one.weight) + x * e.bytes;
      if (p.scale) p.scale += x * p.m * p.groups;
      groups.push_back({p, order.data() + first, nullptr, nullptr});
      first += p.t;
    }
  return groups;
}

// Reserves memory for the rows of some groups.
void reserve(const Experts& e, std::vector<Group>& groups) {
  const auto packed_bytes = [&](const Group& group) {
    return (e.kernel.packed_bytes(group.p) + 63) / 64 * 64;
  };
  int64_t bytes = 0, copied = 0;
  for (const Group& group : groups) bytes += packed_bytes(group), copied += group.p.t;
  char* packed = static_cast<char*>(scratch_of_thread<0>(bytes));
  float* out = static_cast<float*>(scratch_of_thread<2>(4 * copied * e.one.m));
  for (Group& group : groups) {
    const int64_t last = group.p.t - 1;
    group.packed = packed;
    packed += packed_bytes(group);
    if (group.place[last] - group.place[0] == last) {
      group.p.out += group.place[0] * e.one.m;
    } else {
      group.p.out = group.out = out;
      out += group.p.t * e.one.m;
    }
  }
}

// Gathers a group's rows and converts them to the form that its kernel needs.
void pack(const Experts& e, Group& group) {
  Product& p = group.p;
  const int64_t k = p.k, last = p.t - 1;
  const auto row = [&](int64_t i) { return e.one.rows + group.place[i] / e.repeats * k; };
  if (row(last) - row(0) == last * k) {
    p.rows = row(0);
  } else {
    auto* const rows = static_cast<float*>(scratch_of_thread<3>(4 * p.t * k));
    for (int64_t i = 0; i < p.t; i++) std::copy_n(row(i), k, rows + i * k);
    p.rows = rows;
  }
  e.kernel.pack(p, group.packed);
}

struct Part {
  int64_t group;
  Columns columns;
};

// Divides the columns of all groups into parts.
std::vector<Part> parts_of(const Experts& e, const std::vector<Group>& groups, int64_t threads,
                           bool* small) {
  int64_t cost = 0;
  for (const Group& group : groups) cost += ROW_COST + group.p.t;
  std::vector<Part> parts;
  *small = false;
  for (size_t g = 0; g < groups.size(); g++) {
    const Product& p = groups[g].p;
    const int64_t share = PARTS_A_THREAD * threads * (ROW_COST + p.t);
    const int64_t most = std::max<int64_t>(
        1, std::min((share + cost - 1) / cost, e.bytes / PART_BYTES));
    const Pieces pieces(e.kernel, p, std::max<int64_t>(1, threads), most);
    *small = *small || pieces.small();
    for (int64_t i = 0; i < pieces.count(); i++)
      parts.push_back({static_cast<int64_t>(g), pieces[i]});
  }
  return parts;
}

// Computes some columns of a group, and moves them to their places.
void multiply(const Experts& e, const Group& group, Columns now, Columns next) {
  const Product& p = group.p;
  e.kernel.columns(p, group.packed, now, next);
  if (group.out == nullptr) return;
  for (int64_t i = 0; i < p.t; i++)
    std::copy(p.out + i * p.m + now.begin, p.out + i * p.m + now.end,
              e.one.out + group.place[i] * p.m + now.begin);
}

// Computes some groups.
void run(ffi::ThreadPool& pool, const Experts& e, std::vector<Group> groups) {
  const auto count = static_cast<int64_t>(groups.size());
  int64_t rows = 0;
  for (const Group& group : groups) rows += group.p.t;
  reserve(e, groups);
  {
    const FlushDenormals flush;
    share(pool, std::min(count, row_parts(rows, e.one.k)), count,
          [&](int64_t g) { pack(e, groups[g]); });
  }
  const int64_t threads =
      std::min<int64_t>(pool.num_threads(), std::max<int64_t>(1, count * e.bytes / PART_BYTES));
  bool small;
  const std::vector<Part> parts = parts_of(e, groups, threads, &small);
  const auto work = [&](int64_t now, int64_t next) {
    const Part& part = parts[now];
    Columns after{part.columns.end, part.columns.end};
    if (next < static_cast<int64_t>(parts.size()) && parts[next].group == part.group)
      after = parts[next].columns;
    multiply(e, groups[part.group], part.columns, after);
  };
  const auto total = static_cast<int64_t>(parts.size());
  if (small)
    share_out<true>(pool, threads, total, work);
  else
    share_out<false>(pool, threads, total, work);
}

// Computes all results, ROWS_AT_ONCE at a time, which bounds the memory for their rows.
ffi::Error run(ffi::ThreadPool& pool, const Experts& e) {
  std::vector<int64_t> counts;
  const std::vector<int64_t> order = sorted(e, counts);
  const std::vector<Group> groups = groups_of(e, order, counts);
  for (auto begin = groups.begin(), end = begin; begin != groups.end(); begin = end) {
    for (int64_t rows = 0; end != groups.end() && rows < ROWS_AT_ONCE; end++) rows += end->p.t;
    run(pool, e, std::vector<Group>(begin, end));
  }
  return ffi::Error::Success();
}

constexpr char NOT_EXPERTS[] =
    "want rows [n, k], chosen experts [n * repeats], matrices [E, m, k], and results "
    "[n * repeats, m]";

// Checks the shapes of rows, choices and results; `count` matrices have k columns.
bool fits(const F32& rows, const S32& chosen, Out<F32>& out, int64_t k) {
  const auto shape = rows.dimensions(), result = out->dimensions();
  const auto t = static_cast<int64_t>(chosen.element_count());
  return shape.size() == 2 && result.size() == 2 && shape[1] == k && result[0] == t && k > 0 &&
         result[1] > 0 && shape[0] > 0 && t % shape[0] == 0;
}

Product product_of(const F32& rows, const void* weight, const float* scale, Out<F32>& out,
                   int64_t groups) {
  const auto shape = rows.dimensions(), result = out->dimensions();
  return {rows.typed_data(), weight,   scale,     out->typed_data(),
          result[0],         shape[1], result[1], groups};
}

int64_t repeats_of(const F32& rows, const S32& chosen) {
  return static_cast<int64_t>(chosen.element_count()) / rows.dimensions()[0];
}

ffi::Error experts(ffi::ThreadPool pool, F32 rows, S32 chosen, Any weight, Out<F32> out,
                   int64_t level) {
  const auto wide = weight.dimensions();
  if (wide.size() != 3 || !fits(rows, chosen, out, wide[2]) || out->dimensions()[1] != wide[1])
    return refused(NOT_EXPERTS);
  const bool half = weight.element_type() == ffi::BF16;
  if (!half && weight.element_type() != ffi::F32)
    return refused("want matrices in float32 or bfloat16");
  const Product one = product_of(rows, weight.untyped_data(), nullptr, out, 1);
  const ProductKernel& kernel =
      half ? kernels_of(level).bfloat16 : float32_product(level, one.m, one.k);
  const int64_t bytes = one.m * one.k * (half ? 2 : 4);
  return run(pool,
             {kernel, one, wide[0], bytes, chosen.typed_data(), repeats_of(rows, chosen)});
}

ffi::Error experts_int8(ffi::ThreadPool pool, F32 rows, S32 chosen, S8 weight, F32 scale,
                        Out<F32> out, int64_t level) {
  const auto wide = weight.dimensions(), groups = scale.dimensions();
  if (wide.size() != 3 || !fits(rows, chosen, out, wide[2]) || out->dimensions()[1] != wide[1] ||
      groups.size() != 3 || groups[0] != wide[0] || groups[1] != wide[1] || groups[2] < 1 ||
      wide[2] % groups[2] != 0)
    return refused(NOT_EXPERTS);
  const Product one =
      product_of(rows, weight.typed_data(), scale.typed_data(), out, groups[2]);
  return run(pool, {kernels_of(level).int8, one, wide[0], one.m * one.k, chosen.typed_data(),
                    repeats_of(rows, chosen)});
}

ffi::Error experts_panels(ffi::ThreadPool pool, F32 rows, S32 chosen, U8 data, Out<F32> out,
                          int64_t kind, int64_t planes, int64_t level) {
  const auto wide = data.dimensions();
  if (kind < 0 || kind >= PANEL_KINDS || planes < 1 || planes > 2 || wide.size() != 4)
    return refused(NOT_EXPERTS);
  const PanelKind& of = PANEL_KIND[kind];
  if (wide[3] != of.bytes || !fits(rows, chosen, out, wide[2] * of.tile) ||
      wide[1] != (out->dimensions()[1] + PANEL - 1) / PANEL)
    return refused(NOT_EXPERTS);
  const Product one = product_of(rows, data.typed_data(), nullptr, out, 1);
  return run(pool, {panels_of_level(level)[kind].planes[planes - 1], one, wide[0],
                    wide[1] * wide[2] * wide[3], chosen.typed_data(),
                    repeats_of(rows, chosen)});
}

}  // namespace
}  // namespace stree

STREE_KERNEL(experts)
STREE_KERNEL(experts_int8)
STREE_KERNEL(experts_panels, "kind", "planes")
