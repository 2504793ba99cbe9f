// XLA handlers that write an accepted path into a layer's convolution window or KV cache, in
// place. They copy rows of any dtype.
//
// The reference implementations in JAX are `commit_window` in pallas_kernels/conv.py and
// `append_rows` in models/mixers/kv_cache.py.
//
// Letters: B rows of the batch, T nodes, M entries of a path, K1 inputs in a window, Hk
// heads, S rows of a cache.
#include <algorithm>
#include <cstring>

#include "handler.h"

namespace ffi = xla::ffi;

namespace stree {
namespace {

const char* bytes_of(const Any& array) {
  return static_cast<const char*>(array.untyped_data());
}

// Returns a node of a path. Entries past the path's length may have any value and are clamped.
int64_t node_at(const S32& path, int64_t place, int64_t T) {
  return std::clamp<int64_t>(path.typed_data()[place], 0, T - 1);
}

// Writes the last K1 inputs of `before` [B, K1, C] followed by the path's `inputs` [B, T, C].
ffi::Error window(Any before, Any inputs, S32 path, S32 length, Out<Any> after) {
  const auto shape = before.dimensions();
  const int64_t B = shape[0], K1 = shape[1], T = inputs.dimensions()[1];
  const int64_t M = path.dimensions()[1], row = before.size_bytes() / (B * K1);
  const bool rows = path.dimensions()[0] == B && length.dimensions()[0] == B;
  if (!rows || inputs.size_bytes() != static_cast<size_t>(B * T * row))
    return refused("want inputs in the window's dtype and channels");
  char* const out = kept(before, after);
  for (int64_t b = 0; b < B; b++) {
    const int64_t count = std::clamp<int64_t>(length.typed_data()[b], 0, M);
    char* const own = out + b * K1 * row;
    for (int64_t j = 0; j < K1; j++) {  // in place: sources lie at or after their targets
      const int64_t place = j + count - K1;
      const char* from = own + (j + count) * row;
      if (place >= 0)
        from = bytes_of(inputs) + (b * T + node_at(path, b * M + place, T)) * row;
      if (count > 0) std::memcpy(own + j * row, from, row);
    }
  }
  return ffi::Error::Success();
}

// Copies the path's rows of `rows` [B, T, Hk, hd] to the cache [B, Hk, S, hd] from `start` [B].
void append_rows(char* cache, const Any& rows, const S32& path, const S32& start, int64_t S) {
  const auto shape = rows.dimensions();
  const int64_t B = shape[0], T = shape[1], Hk = shape[2], M = path.dimensions()[1];
  const int64_t row = rows.size_bytes() / (B * T * Hk);
  for (int64_t b = 0; b < B; b++) {
    const int64_t first = std::clamp<int64_t>(start.typed_data()[b], 0, S - M);
    for (int64_t j = 0; j < M; j++) {
      const int64_t node = b * T + node_at(path, b * M + j, T);
      for (int64_t h = 0; h < Hk; h++)
        std::memcpy(cache + ((b * Hk + h) * S + first + j) * row,
                    bytes_of(rows) + (node * Hk + h) * row, row);
    }
  }
}

bool shapes_match(const Any& cache, const Any& rows, const S32& path, const S32& start) {
  const auto c = cache.dimensions(), r = rows.dimensions();
  return c[0] == r[0] && c[1] == r[2] && c[3] == r[3] && c[0] == path.dimensions()[0] &&
         c[0] == start.dimensions()[0];
}

ffi::Error append(Any k_cache, Any v_cache, Any k, Any v, S32 path, S32 start,
                  Out<Any> to_k, Out<Any> to_v) {
  const int64_t S = k_cache.dimensions()[2];
  if (path.dimensions()[1] > S)
    return refused("want a cache with at least as many rows as the path");
  if (!shapes_match(k_cache, k, path, start) || !shapes_match(v_cache, v, path, start))
    return refused("want rows with the batch, heads and head size of the caches");
  append_rows(kept(k_cache, to_k), k, path, start, S);
  append_rows(kept(v_cache, to_v), v, path, start, S);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stree

STREE_KERNEL(window)
STREE_KERNEL(append)
