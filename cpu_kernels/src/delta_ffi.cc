// XLA handler for a Gated DeltaNet mixer between its projections.
#include "mixer_work.h"

namespace ffi = xla::ffi;

namespace stree {
namespace {

ffi::Error delta(ffi::ThreadPool pool, F32 qkvz, F32 gates,
                 // Weights, state, records of the last tree and its path, and this tree.
                 Any conv_weight, Any norm, F32 dt_bias, F32 A_log, F32 h0, Any conv0, Any past_u,
                 Any past_k, F32 past_k_scale, F32 past_a, Any past_qkv, S32 path, S32 length,
                 S32 rows, Bool mask, S32 window,
                 // The output, the new state, and records of this tree.
                 Out<F32> y, Out<F32> h, Out<Any> conv, Out<Any> u, Out<Any> k, Out<Any> k_scale,
                 Out<Any> a, Out<Any> qkv, float eps, float beta_max, bool sigmoid,
                 int64_t level) {
  MixerArrays of{qkvz, conv_weight, norm, dt_bias, A_log, h0, conv0, past_u, past_k_scale,
                 past_a, past_k, past_qkv, path, length, rows, mask, window,
                 y, h, conv, u, k_scale, a, k, qkv};
  Delta d{};
  if (const ffi::Error error = describe(d, of); error.failure()) return error;
  d.scan.reads = 2;
  d.scan.a_by_column = past_a.dimensions().size() == 4;
  if (d.scan.a_by_column && d.scan.G != d.scan.H)
    return refused("want as many heads of keys as of values");
  d.to_z = d.channels;
  d.gates = gates.typed_data(), d.gates_width = gates.dimensions()[2];
  d.k_scale = static_cast<float*>(k_scale->untyped_data());
  d.eps = eps, d.beta_max = beta_max, d.sigmoid = sigmoid;
  run_mixer(pool, d, kernels_of(level).delta);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stree

STREE_KERNEL(delta, "eps", "beta_max", "sigmoid")
