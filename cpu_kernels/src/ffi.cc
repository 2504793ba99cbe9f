// What XLA calls: arguments are checked here, and the machine's instructions chosen.
#include <algorithm>
#include <string>

#include "kernels.h"
#include "work.h"

namespace ffi = xla::ffi;

namespace stree {
namespace {

constexpr int64_t PART_BYTES = 1 << 15;  // of weights: less is not worth a hand-over
constexpr int64_t PARTS_A_THREAD = 4;

int64_t instructions() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  const bool all =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return all ? 2 : 1;
#else
  return 0;
#endif
}

bool has_bf16() {
#if defined(__x86_64__)
  return instructions() == 2 && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

bool has_vnni() {
#if defined(__x86_64__)
  return instructions() == 2 && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

// The best kernels of this machine up to a level: 0 portable, 1 AVX2, 2 AVX-512.
Kernels chosen(int64_t level) {
  level = std::min(level, instructions());
#if defined(__x86_64__)
  if (level >= 2) {
    Kernels kernels = avx512();
    if (has_bf16()) kernels.bfloat16 = avx512_bf16();
    kernels.int8 = has_vnni() ? avx512_vnni() : avx2().int8;
    return kernels;
  }
  if (level == 1) return avx2();
#endif
  return portable();
}

const Kernels& kernels_of(int64_t level) {
  static const Kernels levels[] = {chosen(0), chosen(1), chosen(2)};
  return levels[std::clamp<int64_t>(level, 0, 2)];
}

ffi::Error run(ffi::ThreadPool& pool, const ProductKernel& kernel, const Product& p,
               int64_t row_bytes) {
  void* packed = scratch_of_thread(kernel.packed_bytes(p));
  {
    const FlushDenormals flush;
    kernel.pack(p, packed);
  }
  const int64_t most = std::max<int64_t>(1, p.m * row_bytes / PART_BYTES);
  const int64_t parts = std::min(most, PARTS_A_THREAD * pool.num_threads());
  const int64_t blocks = (p.m + 3) / 4;  // of columns, so that no part has a rest
  share(pool, parts, [&](int64_t part) {
    const int64_t begin = blocks * part / parts * 4, end = blocks * (part + 1) / parts * 4;
    kernel.columns(p, packed, begin, std::min(end, p.m));
  });
  return ffi::Error::Success();
}

ffi::Error product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> rows,
                   ffi::AnyBuffer weight, ffi::ResultBuffer<ffi::F32> out,
                   int64_t level) {
  const auto shape = rows.dimensions(), wide = weight.dimensions();
  if (shape.size() != 2 || wide.size() != 2 || shape[1] != wide[1])
    return ffi::Error::InvalidArgument("want rows [t, k] and a weight [m, k]");
  const Product p{rows.typed_data(), weight.untyped_data(), nullptr, out->typed_data(),
                  shape[0],          shape[1],              wide[0], 1};
  const Kernels& kernels = kernels_of(level);
  switch (weight.element_type()) {
    case ffi::F32:
      return run(pool, kernels.float32, p, 4 * p.k);
    case ffi::BF16:
      return run(pool, kernels.bfloat16, p, 2 * p.k);
    default:
      return ffi::Error::InvalidArgument("want a weight in float32 or bfloat16");
  }
}

ffi::Error product_int8(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> rows,
                        ffi::Buffer<ffi::S8> weight, ffi::Buffer<ffi::F32> scale,
                        ffi::ResultBuffer<ffi::F32> out, int64_t level) {
  const auto shape = rows.dimensions(), wide = weight.dimensions();
  const auto groups = scale.dimensions();
  if (shape.size() != 2 || wide.size() != 2 || shape[1] != wide[1] ||
      groups.size() != 2 || groups[0] != wide[0] || shape[1] % groups[1] != 0)
    return ffi::Error::InvalidArgument(
        "want rows [t, k], a weight [m, k] and a scale [m, groups]");
  const Product p{rows.typed_data(), weight.typed_data(), scale.typed_data(),
                  out->typed_data(), shape[0],            shape[1],
                  wide[0],           groups[1]};
  return run(pool, kernels_of(level).int8, p, p.k);
}

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
  const Scan s{{past_x.untyped_data(), past_B.untyped_data(), past_dt.typed_data(),
                past_a.typed_data(), past_x.dimensions()[1]},
               {x.untyped_data(), B.untyped_data(), dt.typed_data(), a.typed_data(),
                x.dimensions()[1]},
               C.untyped_data(),
               D.typed_data(),
               h0.typed_data(),
               path.typed_data(),
               length.typed_data(),
               reinterpret_cast<const uint8_t*>(mask.typed_data()),
               y->typed_data(),
               h->typed_data(),
               state[0],
               state[1],
               state[2],
               state[3],
               groups[2],
               path.dimensions()[1],
               !wide,
               D.element_count() > static_cast<size_t>(state[1])};
  for (int64_t b = 0; b < s.B; b++) {
    bool inside = true;
    for (int64_t j = 0; inside && j < std::min<int64_t>(s.length[b], s.M); j++)
      inside = s.path[b * s.M + j] >= 0 && s.path[b * s.M + j] < s.past.count;
    if (!inside) return ffi::Error::InvalidArgument("a path leads out of its tree");
  }
  const ScanKernel& kernel = kernels_of(level).scan;
  const int64_t heads = s.B * s.H, bytes = kernel.scratch_bytes(s);
  const int64_t most = std::max<int64_t>(1, heads * s.P * s.N * 4 / PART_BYTES);
  const int64_t parts = std::min({most, heads, PARTS_A_THREAD * pool.num_threads()});
  share(pool, parts, [&](int64_t part) {
    kernel.heads(s, scratch_of_thread(bytes), heads * part / parts,
                 heads * (part + 1) / parts);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stree

#define STREE_PUBLIC extern "C" __attribute__((visibility("default")))

// "portable", "avx2" or "avx512", and what this machine has besides.
STREE_PUBLIC const char* stree_instructions() {
  static const std::string name = [] {
    const char* const names[] = {"portable", "avx2", "avx512"};
    std::string text = names[stree::instructions()];
    if (stree::has_bf16()) text += " bf16";
    if (stree::has_vnni()) text += " vnni";
    return text;
  }();
  return name.c_str();
}

STREE_PUBLIC XLA_FFI_Error* stree_product(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::ThreadPool>()
                                   .Arg<ffi::Buffer<ffi::F32>>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Ret<ffi::Buffer<ffi::F32>>()
                                   .Attr<int64_t>("level")
                                   .To(stree::product)
                                   .release();
  return handler->Call(frame);
}

STREE_PUBLIC XLA_FFI_Error* stree_product_int8(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::ThreadPool>()
                                   .Arg<ffi::Buffer<ffi::F32>>()
                                   .Arg<ffi::Buffer<ffi::S8>>()
                                   .Arg<ffi::Buffer<ffi::F32>>()
                                   .Ret<ffi::Buffer<ffi::F32>>()
                                   .Attr<int64_t>("level")
                                   .To(stree::product_int8)
                                   .release();
  return handler->Call(frame);
}

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
