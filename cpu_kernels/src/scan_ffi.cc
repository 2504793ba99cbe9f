// What XLA calls for a replay and scan.
#include "levels.h"
#include "scan_work.h"

namespace ffi = xla::ffi;

namespace stree {
namespace {

bool is_wide(const ffi::AnyBuffer& array) { return array.element_type() == ffi::F32; }

ffi::Error scan(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> h0, ffi::AnyBuffer past_x,
                ffi::Buffer<ffi::F32> past_dt, ffi::Buffer<ffi::F32> past_a,
                ffi::AnyBuffer past_B, ffi::Buffer<ffi::S32> path,
                ffi::Buffer<ffi::S32> length, ffi::AnyBuffer x,
                ffi::Buffer<ffi::F32> dt, ffi::Buffer<ffi::F32> a, ffi::AnyBuffer B,
                ffi::AnyBuffer C, ffi::Buffer<ffi::F32> D, ffi::Buffer<ffi::PRED> mask,
                ffi::ResultBuffer<ffi::F32> y, ffi::ResultBuffer<ffi::F32> h,
                int64_t level) {
  const auto state = h0.dimensions(), groups = B.dimensions();
  const bool wide = is_wide(x);
  if (is_wide(past_x) != wide || is_wide(past_B) != wide || is_wide(B) != wide ||
      is_wide(C) != wide || (!wide && x.element_type() != ffi::BF16))
    return ffi::Error::InvalidArgument("want all of x, B, C in float32 or bfloat16");
  Scan s{{past_x.untyped_data(), past_B.untyped_data(), past_dt.typed_data(),
                past_a.typed_data(), past_x.dimensions()[1]},
               {x.untyped_data(), B.untyped_data(), dt.typed_data(), a.typed_data(),
                x.dimensions()[1]},
               C.untyped_data(),
               D.typed_data(),
               h0.typed_data(),
               path.typed_data(),
               length.typed_data(),
               nullptr,
               reinterpret_cast<const uint8_t*>(mask.typed_data()),
               nullptr,
               nullptr,
               y->typed_data(),
               h->typed_data(),
               state[0],
               state[1],
               state[2],
               state[3],
               groups[2],
               path.dimensions()[1],
               x.dimensions()[1],
               x.dimensions()[1],
               0,
               !wide,
               D.element_count() > static_cast<size_t>(state[1])};
  count_nodes(s, static_cast<int64_t*>(scratch_of_thread<2>(2 * s.batch * sizeof(int64_t))));
  if (!paths_inside(s)) return ffi::Error::InvalidArgument(OUTSIDE);
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

}  // namespace
}  // namespace stree

STREE_PUBLIC XLA_FFI_Error* stree_scan(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::ThreadPool>()
                                   .Arg<ffi::Buffer<ffi::F32>>()  // h0
                                   .Arg<ffi::AnyBuffer>()         // of the last tree
                                   .Arg<ffi::Buffer<ffi::F32>>()
                                   .Arg<ffi::Buffer<ffi::F32>>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::Buffer<ffi::S32>>()
                                   .Arg<ffi::Buffer<ffi::S32>>()
                                   .Arg<ffi::AnyBuffer>()  // of this one
                                   .Arg<ffi::Buffer<ffi::F32>>()
                                   .Arg<ffi::Buffer<ffi::F32>>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::Buffer<ffi::F32>>()
                                   .Arg<ffi::Buffer<ffi::PRED>>()
                                   .Ret<ffi::Buffer<ffi::F32>>()
                                   .Ret<ffi::Buffer<ffi::F32>>()
                                   .Attr<int64_t>("level")
                                   .To(stree::scan)
                                   .release();
  return handler->Call(frame);
}
