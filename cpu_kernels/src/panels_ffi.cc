// XLA handlers for weights that are kept packed: products, and rows of a table.
#include "levels.h"
#include "product_work.h"

namespace ffi = xla::ffi;

namespace stree {
namespace {

constexpr char NOT_PANELS[] = "want panels [panels, tiles, bytes] of a known kind";

// Returns the number of panels, or 0 if the array does not hold panels of the kind for k columns.
int64_t panels_of(const U8& data, int64_t kind, int64_t k) {
  const auto shape = data.dimensions();
  if (kind < 0 || kind >= PANEL_KINDS || shape.size() != 3) return 0;
  const PanelKind& of = PANEL_KIND[kind];
  return shape[2] == of.bytes && shape[1] * of.tile == k ? shape[0] : 0;
}

ffi::Error panels(ffi::ThreadPool pool, F32 rows, U8 data, S32 counts, Out<F32> out, int64_t kind,
                  int64_t planes, int64_t level) {
  const auto shape = rows.dimensions(), result = out->dimensions();
  if (shape.size() != 2 || result.size() != 2 || result[0] != shape[0] || planes < 1 || planes > 2)
    return refused("want rows [t, k], results [t, m], and one or two planes");
  const int64_t k = shape[1], m = result[1];
  if (m < 1 || k < 1 || panels_of(data, kind, k) != (m + PANEL - 1) / PANEL)
    return refused(NOT_PANELS);
  const Product p{rows.typed_data(), data.typed_data(), nullptr, out->typed_data(),
                  shape[0],          k,                 m,       1};
  const PanelKind& of = PANEL_KIND[kind];
  return run_product(pool, panels_of_level(level)[kind].planes[planes - 1], p,
                     ValidRows(counts, p.t), k / of.tile * of.bytes / PANEL);
}

// Decodes rows of a table. Ids out of range are clamped.
ffi::Error decoded(U8& data, S32& ids, Out<F32>& out, int64_t kind) {
  const auto shape = out->dimensions();
  const int64_t k = shape.size() > 0 ? shape[shape.size() - 1] : 0;
  const auto count = static_cast<int64_t>(ids.element_count());
  const int64_t m = PANEL * panels_of(data, kind, k);
  if (m < 1 || k < 1) return refused(NOT_PANELS);
  if (static_cast<int64_t>(out->element_count()) != count * k)
    return refused("want ids [..] and results [.., k]");
  const FlushDenormals flush;
  for (int64_t i = 0; i < count; i++) {
    const int64_t row = std::clamp<int64_t>(ids.typed_data()[i], 0, m - 1);
    decode_panel_row(kind, data.typed_data(), row, k, out->typed_data() + i * k);
  }
  return ffi::Error::Success();
}

// Like `rows`, this kernel can be the first one of a forward pass, and moves the program to a pool
// thread.
ffi::Future panel_rows(ffi::ThreadPool pool, U8 data, S32 ids, Out<F32> out, int64_t kind,
                       int64_t) {
  return going_on_in(pool, decoded(data, ids, out, kind));
}

}  // namespace
}  // namespace stree

STREE_KERNEL(panels, "kind", "planes")
STREE_KERNEL(panel_rows, "kind")
