// Runs a product's kernel on the threads of XLA's pool.
#pragma once
#include <algorithm>

#include "handler.h"
#include "kernels.h"

namespace stree {

inline constexpr int64_t MAX_ROWS = 64;  // rows that the kernels are designed for

// A product's columns, divided into pieces that are multiples of `kernel.together` columns,
// except for the last one.
//
// There are two kinds. Large pieces: a few per thread. Small pieces (`kernel.piece` columns): each
// thread's first pieces are smaller still, because their weights have not been prefetched.
class Pieces {
 public:
  Pieces(const ProductKernel& kernel, const Product& p, int64_t threads, int64_t most)
      : m_(p.m), n_(kernel.together), threads_(threads),
        whole_(kernel.piece ? kernel.piece(p) / n_ : 0) {
    const int64_t blocks = (m_ + n_ - 1) / n_;
    if (whole_ == 0) {
      count_ = std::min({most, PARTS_A_THREAD * threads, blocks});
    } else {
      count_ = 0;
      while (begin(count_) < m_) count_++;
    }
  }
  bool small() const { return whole_ > 0; }
  int64_t count() const { return count_; }
  Columns operator[](int64_t piece) const {
    return {std::min(begin(piece), m_), std::min(begin(piece + 1), m_)};
  }

 private:
  int64_t begin(int64_t piece) const {
    if (whole_ == 0) return (m_ + n_ - 1) / n_ * piece / count_ * n_;
    int64_t blocks = 0;  // blocks before the piece
    for (int64_t size = 1; size < whole_; size *= 2) {
      if (piece < threads_) return (blocks + piece * size) * n_;
      blocks += threads_ * size, piece -= threads_;
    }
    return (blocks + piece * whole_) * n_;
  }
  int64_t m_, n_, threads_, whole_, count_ = 0;
};

inline void multiply(xla::ffi::ThreadPool& pool, const ProductKernel& kernel, const Product& p,
                     int64_t row_bytes) {
  void* packed = scratch_of_thread<0>(kernel.packed_bytes(p));
  {
    const FlushDenormals flush;
    kernel.pack(p, packed);
  }
  const int64_t most = std::max<int64_t>(1, p.m * row_bytes / PART_BYTES);
  const int64_t threads = std::min<int64_t>(pool.num_threads(), most);
  const Pieces pieces(kernel, p, threads, most);
  const auto columns = [&](int64_t piece, int64_t next) {
    kernel.columns(p, packed, pieces[piece], pieces[next]);
  };
  if (pieces.small())
    share_out<true>(pool, threads, pieces.count(), columns);
  else
    share_out<false>(pool, threads, pieces.count(), columns);
}

// Computes the product for the valid rows: gathers them, and moves the results to their places.
inline xla::ffi::Error run_product(xla::ffi::ThreadPool& pool, const ProductKernel& kernel,
                                   Product p, const ValidRows& valid, int64_t row_bytes) {
  if (!valid.fits()) return refused(NOT_ROWS);
  auto* const place = static_cast<int64_t*>(scratch_of_thread<1>(p.t * sizeof(int64_t)));
  int64_t count = 0;
  for (int64_t t = 0; t < p.t; t++)
    if (valid(t)) place[count++] = t;
  p.t = count;
  if (count == 0) return xla::ffi::Error::Success();
  const bool together = place[count - 1] == count - 1;
  const int64_t most = std::min(count, MAX_ROWS);
  float* const gathered =
      together ? nullptr : static_cast<float*>(scratch_of_thread<2>(4 * most * p.k));
  for (int64_t first = 0; first < count; first += MAX_ROWS) {
    Product some = p;
    some.t = std::min(count - first, MAX_ROWS);
    some.rows += first * p.k, some.out += first * p.m;
    if (!together) {
      for (int64_t i = 0; i < some.t; i++)
        std::copy_n(p.rows + place[first + i] * p.k, p.k, gathered + i * p.k);
      some.rows = gathered;
    }
    multiply(pool, kernel, some, row_bytes);
  }
  for (int64_t i = count; !together && i-- > 0;)  // from the end, as places only grow
    if (place[i] != i) std::copy_n(p.out + i * p.m, p.m, p.out + place[i] * p.m);
  return xla::ffi::Error::Success();
}

}  // namespace stree
