// XLA handler for attention.
#include <algorithm>

#include "handler.h"
#include "levels.h"

namespace ffi = xla::ffi;

namespace stree {
namespace {

constexpr int64_t TILE = 96;  // queries per tile, a multiple of six and of 16

// Counts each row's queries up to the last one whose mask is not empty. The rest is padding,
// for which nothing is computed.
void count_queries(Attention& a, int64_t* counts) {
  for (int64_t b = 0; b < a.batch; b++) {
    const uint8_t* const mask = a.mask + b * a.Tq * a.T;
    const auto is_padding = [&](int64_t q) {
      return std::all_of(mask + q * a.T, mask + (q + 1) * a.T, [](auto x) { return !x; });
    };
    int64_t& count = counts[b] = a.Tq;
    while (count > 0 && is_padding(count - 1)) count--;
  }
  a.queries = counts;
}

ffi::Error attention(ffi::ThreadPool pool, F32 q, Any k, Any v, Any k_cache, Any v_cache,
                     S32 length, Bool mask, S32 first, Any sink, Out<F32> out, float scale, int64_t level) {
  const auto queries = q.dimensions(), nodes = k.dimensions(), cache = k_cache.dimensions();
  if (queries.size() != 4 || nodes.size() != 4 || cache.size() != 4 ||
      queries[2] % nodes[2] != 0)
    return refused("want q [B, Tq, Hq, hd] and k [B, T, Hk, hd]");
  const bool wide = k.element_type() == ffi::F32;
  for (const auto* array : {&k, &v, &k_cache, &v_cache})
    if (array->element_type() != (wide ? ffi::F32 : ffi::U16))
      return refused("want k, v and both caches in float32, or all as bits of bfloat16");
  Attention a{};
  a.q = q.typed_data(), a.out = out->typed_data(), a.length = length.typed_data();
  a.k = k.untyped_data(), a.v = v.untyped_data();
  a.k_cache = k_cache.untyped_data(), a.v_cache = v_cache.untyped_data();
  a.mask = reinterpret_cast<const uint8_t*>(mask.typed_data());
  a.batch = queries[0], a.Tq = queries[1], a.Hq = queries[2], a.hd = queries[3];
  a.T = nodes[1], a.Hk = nodes[2], a.S = cache[2], a.scale = scale;
  if (first.element_count() > 0) a.first = first.typed_data();
  if (sink.element_count() > 0) {
    if (sink.element_type() != ffi::F32) return refused("want a sink in float32");
    a.sink = static_cast<const float*>(sink.untyped_data());
  }
  count_queries(a, static_cast<int64_t*>(scratch_of_thread<2>(a.batch * sizeof(int64_t))));
  const int64_t rows = a.Tq * (a.Hq / a.Hk);
  // Whole blocks of 16 rows, which kernels with tiles read and write.
  a.tile = std::min((rows + 15) / 16 * 16, TILE), a.tiles = (rows + a.tile - 1) / a.tile;
  int64_t longest = 0;
  for (int64_t b = 0; b < a.batch; b++)
    longest = std::max(longest, std::min<int64_t>(std::max(0, a.length[b]), a.S));
  a.splits = 0;
  for (int64_t b = 0; b < a.batch; b++)
    a.splits = std::max(a.splits, split_count(std::min<int64_t>(std::max(0, a.length[b]), a.S)));
  const Kernels& kernels = kernels_of(level);
  const AttentionKernel& kernel = wide ? kernels.attention : kernels.attention_bfloat16;
  const int64_t units = a.batch * a.Hk * a.tiles, own = kernel.own_bytes(a);
  const int64_t threads = pool.num_threads();
  const int64_t bytes = units * (a.T + longest) * a.hd * (wide ? 8 : 4);
  const int64_t most = std::max<int64_t>(1, bytes / PART_BYTES);
  if (a.splits < 2 || units >= 4 * threads) {
    share(pool, std::min({units, most, 8 * threads}), units, [&](int64_t unit) {
      kernel.whole(a, scratch_of_thread<1>(own), unit);
    });
    return ffi::Error::Success();
  }
  const int64_t parts = units * (a.splits + 1);
  a.partial = static_cast<float*>(scratch_of_thread<0>(parts * a.tile * (a.hd + 2) * 4));
  share(pool, parts, parts, [&](int64_t i) {
    const int64_t unit = i / (a.splits + 1), part = i % (a.splits + 1);
    kernel.part(a, scratch_of_thread<1>(own), unit, part);
  });
  for (int64_t unit = 0; unit < units; unit++) kernel.merge(a, unit);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stree

STREE_KERNEL(attention, "scale")
