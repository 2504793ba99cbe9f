// Checks and describes the arrays of a mixer's handler, and divides its work among threads.
#pragma once
#include <cstring>

#include "handler.h"
#include "levels.h"
#include "scan_work.h"

namespace stree {

// The arrays that all mixers have, under the names of `Mixer`: weights, state, records of the last
// tree and its path, and this tree; then the output, the new state, and records of this tree.
struct MixerArrays {
  F32 in;
  Any conv_weight, norm;
  F32 dt_bias, A_log;
  F32 h0;
  Any conv0, past_x;
  F32 past_dt, past_a;
  Any past_B, past_inputs;
  S32 path, length, rows;
  Bool mask;
  S32 window;
  Out<F32> y, h;
  Out<Any> conv, x, dt, a, B, inputs;
};

inline const void* if_any(const Any& array) {
  return array.element_count() ? array.untyped_data() : nullptr;
}

// Sets what all mixers have in common, with one vector C per query.
inline xla::ffi::Error describe(Mixer& m, MixerArrays& of) {
  const auto state = of.h0.dimensions(), taps = of.window.dimensions();
  const auto in_shape = of.in.dimensions();
  const bool has_rows = of.rows.element_count() > 0;
  const int64_t T = taps[1], last = of.past_x.dimensions()[1], capacity = of.x->dimensions()[1];
  if (in_shape.size() != 3 || taps[2] > 16 ||
      in_shape[1] != (has_rows ? of.rows.dimensions()[0] : T))
    return refused("want [B, Tq, width] and at most 16 taps");
  if (has_rows && last != T) return refused("want records of this tree");
  if (capacity != std::max(T, last))
    return refused("want results with as many rows as the larger tree has nodes");
  Scan& s = m.scan;
  const auto* const dt = static_cast<const float*>(of.dt->untyped_data());
  m.a = static_cast<float*>(of.a->untyped_data());
  s.past = {of.past_x.untyped_data(), of.past_B.untyped_data(), of.past_dt.typed_data(),
            of.past_a.typed_data(), last};
  s.now = {of.x->untyped_data(), of.B->untyped_data(), dt, m.a, capacity};
  // A state that does not change has an empty result.
  const bool reads = of.h->element_count() == 0;
  s.h0 = of.h0.typed_data(), s.h = reads ? of.h0.typed_data() : of.h->typed_data();
  s.y = of.y->typed_data();
  s.path = of.path.typed_data(), s.length = of.length.typed_data();
  s.rows = has_rows ? of.rows.typed_data() : nullptr;
  s.mask = reinterpret_cast<const uint8_t*>(of.mask.typed_data());
  s.batch = state[0], s.H = state[1], s.P = state[2], s.N = state[3];
  s.G = of.B->dimensions()[2], s.M = of.path.dimensions()[1];
  s.T = T, s.Tq = in_shape[1], s.K = taps[2], s.reads = 1;
  s.bf16 = of.B->element_type() == xla::ffi::BF16;
  s.x_bf16 = of.x->element_type() == xla::ffi::BF16;
  m.in = of.in.typed_data(), m.width = in_shape[2];
  m.channels = of.conv_weight.dimensions()[0];
  m.conv_weight = of.conv_weight.untyped_data(), m.norm = if_any(of.norm);
  m.weights_bf16 = of.conv_weight.element_type() == xla::ffi::BF16;
  m.dt_bias = of.dt_bias.typed_data(), m.A_log = of.A_log.typed_data();
  m.window = of.window.typed_data();
  m.conv0 = of.conv0.untyped_data(), m.past_inputs = of.past_inputs.untyped_data();
  m.conv = reads ? of.conv0.untyped_data() : of.conv->untyped_data();
  m.x = of.x->untyped_data(), m.B = of.B->untyped_data();
  m.inputs = of.inputs->untyped_data();
  if (!plan(s)) return refused(NO_TREE);
  for (int64_t b = 0; reads && b < s.batch; b++)
    if (s.length[b] > 0) return refused("a path needs a result for the new state");
  if (!paths_inside(s)) return refused(OUTSIDE);
  if (has_rows || capacity > T) {
    // Rows that this tree does not write keep their values.
    kept(of.past_x, of.x), kept(of.past_B, of.B), kept(of.past_inputs, of.inputs);
    kept(of.past_dt, of.dt), kept(of.past_a, of.a);
  }
  return xla::ffi::Error::Success();
}

template <class M>
void run_mixer(xla::ffi::ThreadPool& pool, const M& m, const MixerKernel<M>& kernel) {
  const Scan& s = m.scan;
  void* const shared = scratch_of_thread<0>(kernel.shared_bytes(m));
  const int64_t own = kernel.own_bytes(m);
  share(pool, group_parts(s), s.batch * s.G, [&](int64_t i) {
    kernel.group(m, shared, i / s.G, i % s.G);
  });
  share_heads(pool, s, [&](int64_t head, int64_t next) {
    kernel.head(m, shared, scratch_of_thread<1>(own), head, next);
  });
  if (!kernel.norm) return;
  const int64_t queries = s.batch * s.Tq, bytes = 4 * queries * s.H * s.P;
  const int64_t parts = std::max<int64_t>(1, std::min(queries, bytes / (4 * PART_BYTES)));
  share(pool, parts, queries, [&](int64_t i) {
    kernel.norm(m, shared, i / s.Tq, i % s.Tq);
  });
}

}  // namespace stree
