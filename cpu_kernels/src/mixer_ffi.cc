// XLA handler for a Mamba2 mixer between its projections.
#include <cstring>

#include "handler.h"
#include "levels.h"
#include "scan_work.h"

namespace ffi = xla::ffi;

namespace stree {
namespace {

const void* if_any(const Any& array) {
  return array.element_count() ? array.untyped_data() : nullptr;
}

ffi::Error mixer(ffi::ThreadPool pool, F32 in,
                 // Weights, state, records of the last tree and its path, and this tree.
                 Any conv_weight, Any conv_bias, Any norm, F32 dt_bias, F32 A_log, F32 D,
                 F32 h0, Any conv0, Any past_x, F32 past_dt, F32 past_a, Any past_B, Any past_xBC,
                 S32 path, S32 length, S32 rows, Bool mask, S32 window,
                 // The output, the new state, and records of this tree.
                 Out<F32> y, Out<F32> h, Out<Any> conv, Out<Any> x, Out<Any> dt, Out<Any> a,
                 Out<Any> B, Out<Any> xBC, int64_t to_z, int64_t norm_groups, bool norm_first,
                 float eps, float least_dt, float most_dt, int64_t level) {
  const auto state = h0.dimensions(), taps = window.dimensions();
  const auto in_shape = in.dimensions(), groups = B->dimensions();
  const bool wide = x->element_type() == ffi::F32;
  const bool weights_wide = conv_weight.element_type() == ffi::F32;
  const bool has_rows = rows.element_count() > 0;
  const int64_t T = taps[1], H = state[1], P = state[2];
  const int64_t channels = conv_weight.dimensions()[0];
  if (in_shape.size() != 3 || taps[2] > 16 ||
      in_shape[1] != (has_rows ? rows.dimensions()[0] : T))
    return refused("want [B, Tq, width] and at most 16 taps");
  if (has_rows && past_x.dimensions()[1] != T)
    return refused("want records of this tree");
  if (x->dimensions()[1] != std::max(T, past_x.dimensions()[1]))
    return refused("want results with as many rows as the larger tree has nodes");
  Mixer m{};
  Scan& s = m.scan;
  auto* const dt_out = static_cast<float*>(dt->untyped_data());
  auto* const a_out = static_cast<float*>(a->untyped_data());
  s.past = {past_x.untyped_data(), past_B.untyped_data(), past_dt.typed_data(),
            past_a.typed_data(), past_x.dimensions()[1]};
  s.now = {x->untyped_data(), B->untyped_data(), dt_out, a_out, x->dimensions()[1]};
  s.D = D.typed_data();
  // A state that does not change has an empty result.
  const bool reads = h->element_count() == 0;
  s.h0 = h0.typed_data(), s.h = reads ? h0.typed_data() : h->typed_data();
  s.y = y->typed_data();
  s.path = path.typed_data(), s.length = length.typed_data();
  s.rows = has_rows ? rows.typed_data() : nullptr;
  s.mask = reinterpret_cast<const uint8_t*>(mask.typed_data());
  s.batch = state[0], s.H = H, s.P = P, s.N = state[3], s.G = groups[2];
  s.M = path.dimensions()[1], s.T = T, s.Tq = in_shape[1], s.K = taps[2];
  s.bf16 = !wide, s.D_by_channel = D.element_count() > static_cast<size_t>(H);
  m.in = in.typed_data(), m.width = in_shape[2], m.channels = channels;
  m.to_z = to_z, m.to_xBC = to_z + H * P, m.to_dt = m.to_xBC + channels;
  m.conv_weight = conv_weight.untyped_data(), m.conv_bias = if_any(conv_bias);
  m.norm = if_any(norm), m.norm_groups = norm_groups, m.norm_first = norm_first;
  m.dt_bias = dt_bias.typed_data(), m.A_log = A_log.typed_data();
  m.window = window.typed_data();
  m.conv0 = conv0.untyped_data(), m.past_xBC = past_xBC.untyped_data();
  m.conv = reads ? conv0.untyped_data() : conv->untyped_data();
  m.x = x->untyped_data(), m.B = B->untyped_data();
  m.xBC = xBC->untyped_data(), m.dt = dt_out, m.a = a_out;
  m.eps = eps, m.least_dt = least_dt, m.most_dt = most_dt;
  m.weights_bf16 = !weights_wide;
  count_nodes(s, static_cast<int64_t*>(scratch_of_thread<2>(2 * s.batch * sizeof(int64_t))));
  for (int64_t b = 0; reads && b < s.batch; b++)
    if (s.length[b] > 0) return refused("a path needs a result for the new state");
  if (!paths_inside(s)) return refused(OUTSIDE);
  if (has_rows || s.now.capacity > T) {
    // Rows that this tree does not write keep their values.
    kept(past_x, x), kept(past_B, B), kept(past_xBC, xBC);
    kept(past_dt, dt), kept(past_a, a);
  }
  const MixerKernel& kernel = kernels_of(level).mixer;
  void* const shared = scratch_of_thread<0>(kernel.shared_bytes(m));
  const int64_t own = kernel.own_bytes(m);
  share(pool, group_parts(s), s.batch * s.G, [&](int64_t i) {
    kernel.group(m, shared, i / s.G, i % s.G);
  });
  share_heads(pool, s, [&](int64_t head, int64_t next) {
    kernel.head(m, shared, scratch_of_thread<1>(own), head, next);
  });
  const int64_t queries = s.batch * s.Tq, bytes = 4 * queries * H * P;
  const int64_t parts = std::max<int64_t>(1, std::min(queries, bytes / (4 * PART_BYTES)));
  share(pool, parts, queries, [&](int64_t i) {
    kernel.norm(m, shared, i / s.Tq, i % s.Tq);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stree

STREE_KERNEL(mixer, "to_z", "norm_groups", "norm_first", "eps", "least_dt", "most_dt")
