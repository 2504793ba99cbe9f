// XLA handlers for the selective scan of Mamba-1.
#include "handler.h"
#include "levels.h"
#include "scan_work.h"

namespace ffi = xla::ffi;

namespace stree {
namespace {

// Returns the replay of a path; `selective` adds this tree.
Selective path_of(const F32& h0, const Any& x, const F32& dt, const F32& B, const S32& path,
                  const S32& length, const F32& A, Out<F32>& h) {
  const auto state = h0.dimensions();
  Selective s{};
  s.past_x = x.untyped_data(), s.past_dt = dt.typed_data(), s.past_B = B.typed_data();
  s.path = path.typed_data(), s.length = length.typed_data();
  s.A = A.typed_data(), s.h0 = h0.typed_data();
  s.h = h->element_count() > 0 ? h->typed_data() : nullptr;
  s.batch = state[0], s.N = state[1], s.D = state[2];
  s.M = path.dimensions()[1], s.capacity = x.dimensions()[1];
  s.bf16 = x.element_type() == ffi::BF16;
  return s;
}

bool path_inside(const Selective& s) {
  for (int64_t b = 0; b < s.batch && s.h != nullptr; b++)
    for (int64_t j = 0; j < std::min<int64_t>(s.length[b], s.M); j++) {
      const int32_t row = s.path[b * s.M + j];
      if (row < 0 || row >= s.capacity) return false;
    }
  return true;
}

// Finds for each node its query: its index among the queried nodes, UNREAD_NODE for an ancestor of
// one, or UNUSED_NODE. Returns false if a parent does not come before its child.
bool find_queries(const Selective& s, const S32& rows, int32_t* query) {
  const auto listed = static_cast<int64_t>(rows.element_count());
  for (int64_t b = 0; b < s.batch; b++) {
    const int32_t* const parents = s.parents + b * s.T;
    int32_t* const own = query + b * s.T;
    for (int64_t t = 0; t < s.T; t++) {
      if (parents[t] >= t) return false;
      own[t] = listed || parents[t] < -1 ? UNUSED_NODE : static_cast<int32_t>(t);
    }
    for (int64_t q = 0; q < listed; q++) {
      const int32_t row = rows.typed_data()[q];
      if (row >= 0 && row < s.T) own[row] = static_cast<int32_t>(q);
    }
    if (listed)
      for (int64_t t = s.T - 1; t > 0; t--)
        if (own[t] != UNUSED_NODE && parents[t] >= 0 && own[parents[t]] == UNUSED_NODE)
          own[parents[t]] = UNREAD_NODE;
  }
  return true;
}

ffi::Error run(ffi::ThreadPool& pool, const Selective& s, int64_t level) {
  if (!path_inside(s)) return refused(OUTSIDE);
  const SelectiveKernel& kernel = kernels_of(level).selective;
  const int64_t blocks = (s.D + kernel.width - 1) / kernel.width, count = s.batch * blocks;
  const int64_t numbers = count * kernel.width * s.N * (s.T + s.M);
  const int64_t parts =
      std::max<int64_t>(1, std::min({count, numbers / NUMBERS, PARTS_A_THREAD * pool.num_threads()}));
  const int64_t own = kernel.own_bytes(s);
  share(pool, parts, count, [&](int64_t i) {
    kernel.block(s, scratch_of_thread<1>(own), i / blocks, i % blocks * kernel.width);
  });
  return ffi::Error::Success();
}

ffi::Error selective(ffi::ThreadPool pool, F32 h0, Any past_x, F32 past_dt, F32 past_B, S32 path,
                     S32 length, Any x, F32 dt, F32 B, F32 C, F32 A, F32 D, S32 parents, S32 rows,
                     Out<F32> y, Out<F32> h, bool chain, int64_t level) {
  Selective s = path_of(h0, past_x, past_dt, past_B, path, length, A, h);
  if (x.element_type() != past_x.element_type()) return refused("want one dtype of x");
  s.x = x.untyped_data(), s.dt = dt.typed_data(), s.B = B.typed_data(), s.C = C.typed_data();
  s.skip = D.typed_data(), s.parents = parents.typed_data(), s.y = y->typed_data();
  s.T = x.dimensions()[1], s.Tq = C.dimensions()[1], s.chain = chain;
  auto* const query =
      static_cast<int32_t*>(scratch_of_thread<2>(s.batch * s.T * sizeof(int32_t)));
  if (!find_queries(s, rows, query)) return refused("a parent comes after its child");
  s.query = query;
  return run(pool, s, level);
}

ffi::Error selective_replay(ffi::ThreadPool pool, F32 h0, Any x, F32 dt, F32 B, S32 path,
                            S32 length, F32 A, Out<F32> h, int64_t level) {
  return run(pool, path_of(h0, x, dt, B, path, length, A, h), level);
}

}  // namespace
}  // namespace stree

STREE_KERNEL(selective, "chain")
STREE_KERNEL(selective_replay)
