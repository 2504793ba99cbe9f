// XLA handler for attention.
#include <algorithm>

#include "handler.h"
#include "levels.h"

namespace ffi = xla::ffi;

namespace stree {
namespace {

constexpr int64_t TILE = 96;  // queries per tile, a multiple of six and of 16

// Lists the nodes that each query sees, and counts each row's queries up to the last one that sees
// any. The rest is padding, for which nothing is computed.
void list_ancestors(Attention& a) {
  const int64_t rows = a.batch * a.Tq, counts = 2 * a.batch;
  const int64_t bytes = 8 * counts + 4 * rows * (a.T + 1);
  auto* const memory = static_cast<int64_t*>(scratch_of_thread<2>(bytes));
  auto* const count = reinterpret_cast<int32_t*>(memory + counts);
  int32_t* const ancestors = count + rows;
  for (int64_t row = 0; row < rows; row++) {
    int32_t *const list = ancestors + row * a.T, found = 0;
    const uint8_t* const mask = a.mask + row * a.T;
    for (int64_t t = 0; t < a.T; t++) {
      list[found] = static_cast<int32_t>(t);  // overwritten unless the query sees it
      found += mask[t] != 0;
    }
    count[row] = found;
  }
  for (int64_t b = 0; b < a.batch; b++) {
    int64_t &queries = memory[b] = a.Tq, &places = memory[a.batch + b] = 0;
    while (queries > 0 && count[b * a.Tq + queries - 1] == 0) queries--;
    const int64_t length = std::clamp<int64_t>(a.length[b], 0, a.S);
    for (int64_t q = b * a.Tq; q < b * a.Tq + queries; q++) {
      const int64_t root = std::max<int64_t>(length, a.first ? a.first[q] : 0);
      places = std::max(places, root + count[q]);
    }
  }
  a.count = count, a.ancestors = ancestors, a.queries = memory, a.places = memory + a.batch;
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
  list_ancestors(a);
  const int64_t rows = a.Tq * (a.Hq / a.Hk);
  // Whole blocks of 16 rows, which kernels with tiles read and write.
  a.tile = std::min((rows + 15) / 16 * 16, TILE), a.tiles = (rows + a.tile - 1) / a.tile;
  const int64_t longest = *std::max_element(a.places, a.places + a.batch);
  a.parts = std::max<int64_t>(1, (longest + PART - 1) / PART);
  const Kernels& kernels = kernels_of(level);
  const AttentionKernel& kernel = wide ? kernels.attention : kernels.attention_bfloat16;
  const int64_t units = a.batch * a.Hk * a.tiles, own = kernel.own_bytes(a);
  const int64_t threads = pool.num_threads();
  const int64_t bytes = units * longest * a.hd * (wide ? 8 : 4);
  const int64_t most = std::max<int64_t>(1, bytes / PART_BYTES);
  if (a.parts < 2 || units >= 4 * threads) {
    share(pool, std::min({units, most, 8 * threads}), units, [&](int64_t unit) {
      kernel.whole(a, scratch_of_thread<1>(own), unit);
    });
    return ffi::Error::Success();
  }
  const int64_t parts = units * a.parts;
  a.partial = static_cast<float*>(scratch_of_thread<0>(parts * a.tile * (a.hd + 2) * 4));
  share(pool, parts, parts, [&](int64_t i) {
    kernel.part(a, scratch_of_thread<1>(own), i / a.parts, i % a.parts);
  });
  for (int64_t unit = 0; unit < units; unit++) kernel.merge(a, unit);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stree

STREE_KERNEL(attention, "scale")
