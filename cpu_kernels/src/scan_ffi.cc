// XLA handlers for the replay of a path, alone or with the scan of a tree.
#include "handler.h"
#include "levels.h"
#include "scan_work.h"

namespace ffi = xla::ffi;

namespace stree {
namespace {

// Returns the scan inputs [B, capacity, ...] of one tree.
Tokens tokens_of(const Any& x, const F32& dt, const F32& a, const Any& B) {
  return {x.untyped_data(), B.untyped_data(), dt.typed_data(), a.typed_data(),
          x.dimensions()[1]};
}

// Returns a scan with the last tree and its path; `scan` adds this tree.
Scan replay_of(const F32& h0, const Tokens& past, int64_t groups, const S32& path,
               const S32& length, Out<F32>& h) {
  const auto state = h0.dimensions();
  Scan s{};
  s.past = s.now = past;
  s.h0 = h0.typed_data(), s.h = h->typed_data();
  s.path = path.typed_data(), s.length = length.typed_data();
  s.batch = state[0], s.H = state[1], s.P = state[2], s.N = state[3];
  s.G = groups, s.M = path.dimensions()[1], s.reads = 1;
  return s;
}

ffi::Error run(ffi::ThreadPool& pool, Scan& s, int64_t level) {
  if (!plan(s)) return refused(NO_TREE);
  if (!paths_inside(s)) return refused(OUTSIDE);
  const ScanKernel& kernel = kernels_of(level).scan;
  void* const shared = scratch_of_thread<0>(kernel.shared_bytes(s));
  const int64_t own = kernel.own_bytes(s);
  share(pool, group_parts(s), s.batch * s.G, [&](int64_t i) {
    kernel.group(s, shared, i / s.G, i % s.G);
  });
  share_heads(pool, s, [&](int64_t head, int64_t next) {
    kernel.head(s, shared, scratch_of_thread<1>(own), head, next);
  });
  return ffi::Error::Success();
}

// True if all arrays are bfloat16 or all are float32. Sets the dtype of the scan.
bool of_one_dtype(Scan& s, std::initializer_list<const Any*> arrays) {
  const auto dtype = (*arrays.begin())->element_type();
  s.bf16 = s.x_bf16 = dtype == ffi::BF16;
  return (s.bf16 || dtype == ffi::F32) &&
         std::all_of(arrays.begin(), arrays.end(),
                     [&](const Any* array) { return array->element_type() == dtype; });
}

ffi::Error scan(ffi::ThreadPool pool, F32 h0, Any past_x, F32 past_dt, F32 past_a,
                Any past_B, S32 path, S32 length, Any x, F32 dt, F32 a, Any B, Any C, F32 D,
                Bool mask, Out<F32> y, Out<F32> h, int64_t level) {
  const Tokens past = tokens_of(past_x, past_dt, past_a, past_B);
  Scan s = replay_of(h0, past, B.dimensions()[2], path, length, h);
  if (!of_one_dtype(s, {&x, &past_x, &past_B, &B, &C}))
    return refused("want all of x, B, C in float32 or bfloat16");
  s.now = tokens_of(x, dt, a, B);
  s.T = s.Tq = s.now.capacity;
  s.C = C.untyped_data(), s.D = D.typed_data(), s.y = y->typed_data();
  s.mask = reinterpret_cast<const uint8_t*>(mask.typed_data());
  s.D_by_channel = D.element_count() > static_cast<size_t>(s.H);
  return run(pool, s, level);
}

// A scan of an empty tree.
ffi::Error replay(ffi::ThreadPool pool, F32 h0, Any x, F32 dt, F32 a, Any B, S32 path,
                  S32 length, Out<F32> h, int64_t level) {
  Scan s = replay_of(h0, tokens_of(x, dt, a, B), B.dimensions()[2], path, length, h);
  if (!of_one_dtype(s, {&x, &B})) return refused("want x and B in float32 or bfloat16");
  s.now.capacity = 0;
  s.a_by_column = a.dimensions().size() == 4;
  if (s.a_by_column && s.G != s.H) return refused("want as many heads of B as of x");
  return run(pool, s, level);
}

}  // namespace
}  // namespace stree

STREE_KERNEL(scan)
STREE_KERNEL(replay)
