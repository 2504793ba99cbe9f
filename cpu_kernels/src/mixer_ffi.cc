// XLA handler for a Mamba2 mixer between its projections.
#include "mixer_work.h"

namespace ffi = xla::ffi;

namespace stree {
namespace {

ffi::Error mixer(ffi::ThreadPool pool, F32 in,
                 // Weights, state, records of the last tree and its path, and this tree.
                 Any conv_weight, Any conv_bias, Any norm, F32 dt_bias, F32 A_log, F32 D,
                 F32 h0, Any conv0, Any past_x, F32 past_dt, F32 past_a, Any past_B, Any past_xBC,
                 S32 path, S32 length, S32 rows, Bool mask, S32 window,
                 // The output, the new state, and records of this tree.
                 Out<F32> y, Out<F32> h, Out<Any> conv, Out<Any> x, Out<Any> dt, Out<Any> a,
                 Out<Any> B, Out<Any> xBC, int64_t to_z, int64_t norm_groups, bool norm_first,
                 float eps, float least_dt, float most_dt, int64_t level) {
  MixerArrays of{in, conv_weight, norm, dt_bias, A_log, h0, conv0, past_x, past_dt, past_a,
                 past_B, past_xBC, path, length, rows, mask, window,
                 y, h, conv, x, dt, a, B, xBC};
  Mamba2 m{};
  if (const ffi::Error error = describe(m, of); error.failure()) return error;
  Scan& s = m.scan;
  s.D = D.typed_data(), s.D_by_channel = D.element_count() > static_cast<size_t>(s.H);
  m.to_z = to_z, m.to_inputs = to_z + s.H * s.P, m.to_dt = m.to_inputs + m.channels;
  m.conv_bias = if_any(conv_bias);
  m.norm_groups = norm_groups, m.norm_first = norm_first;
  m.dt = static_cast<float*>(dt->untyped_data());
  m.eps = eps, m.least_dt = least_dt, m.most_dt = most_dt;
  run_mixer(pool, m, kernels_of(level).mixer);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stree

STREE_KERNEL(mixer, "to_z", "norm_groups", "norm_first", "eps", "least_dt", "most_dt")
