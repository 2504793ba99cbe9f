// Work shared with XLA's own threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

#define STREE_PUBLIC extern "C" __attribute__((visibility("default")))

namespace stree {

constexpr int64_t PART_BYTES = 1 << 15;  // of weights: less is not worth a hand-over
constexpr int64_t PARTS_A_THREAD = 4;
constexpr int64_t NUMBERS = 1 << 14;  // to be gone through: fewer are not worth one, either

// Parts of `rows` rows of n numbers, of whole rows.
inline int64_t row_parts(int64_t rows, int64_t n) {
  return std::max<int64_t>(1, std::min(rows, rows * n / NUMBERS));
}

// `after`, holding what `before` does: XLA may not have given us the same memory.
template <class Before, class After>
char* kept(const Before& before, After& after) {
  if (before.untyped_data() != after->untyped_data())
    std::memcpy(after->untyped_data(), before.untyped_data(), before.size_bytes());
  return static_cast<char*>(after->untyped_data());
}

// Which rows of [B, T] are tokens: in each row of the batch the first `counts` [B]; all
// where there are no counts. Nothing becomes of the others, nor is anything written.
class Live {
 public:
  Live(const xla::ffi::Buffer<xla::ffi::S32>& counts, int64_t rows)
      : counts_(counts.typed_data()),
        batch_(static_cast<int64_t>(counts.element_count())),
        tokens_(batch_ > 0 ? rows / batch_ : 1),
        fits_(batch_ == 0 || rows % batch_ == 0) {}
  bool fits() const { return fits_; }
  bool operator()(int64_t row) const {
    return batch_ == 0 || row % tokens_ < counts_[row / tokens_];
  }

 private:
  const int32_t* counts_;
  int64_t batch_, tokens_;
  bool fits_;
};

constexpr char NOT_ROWS[] = "want counts [B] of rows [B, T]";

// Numbers too small to be normal are 0 here, whatever thread computes them: threads of
// XLA's pool and callers may be set differently, and results must not be.
class FlushDenormals {
#if defined(__x86_64__)
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(0x9FC0); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#endif
};

// An array of this thread's own, aligned to 64 bytes, which grows and is kept; another
// for every PLACE.
template <int PLACE>
inline void* scratch_of_thread(int64_t bytes) {
  thread_local std::unique_ptr<char[]> memory;
  thread_local int64_t held = 0;
  if (bytes > held) {
    memory.reset(new char[bytes + 64]);
    held = bytes;
  }
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  return memory.get() + (64 - address % 64) % 64;
}

// Whether this thread is one of the pool's.
inline thread_local bool in_pool = false;

// Has what comes after a call go on in a thread of the pool.
//
// XLA begins a program in a thread of its own, and may stay there. With it the pool has a
// thread too many for its cores: one looks for work and the others sleep, and Eigen wakes
// one that sleeps for every task there is.
inline xla::ffi::Future going_on_in(xla::ffi::ThreadPool& pool, const xla::ffi::Error& error) {
  xla::ffi::Promise promise;
  xla::ffi::Future future(promise);
  if (error.failure()) {
    promise.SetError(error);
  } else if (in_pool || pool.num_threads() < 2) {
    promise.SetAvailable();
  } else {
    pool.Schedule([promise]() mutable {
      in_pool = true;
      promise.SetAvailable();
    });
  }
  return future;
}

// Has a thread of the pool look for work, so that it has not gone to sleep by the time
// there is some: to wake one can take as long as a small product (40 us on a virtual
// machine), and takes it of whoever has the work.
inline void keep_awake(xla::ffi::ThreadPool& pool) {
  if (pool.num_threads() > 1) pool.Schedule([] {});
}

// work(part, next) for every part below `parts`, by this thread and up to `threads` - 1 of the
// pool's. AHEAD: a thread takes its next part before it does this one, and so knows it; of
// many small parts. Otherwise `next` is `parts`, which is none.
//
// Whoever is free takes the next part. The caller takes parts, too, and so never waits
// for a task that has not begun: it may itself be one of the pool's threads.
template <bool AHEAD, class Work>
void share_out(xla::ffi::ThreadPool& pool, int64_t threads, int64_t parts, const Work& work) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
    std::atomic<bool> failed{false};
  };
  const int64_t helpers = std::min({pool.num_threads(), threads, parts}) - 1;
  if (helpers < 1) {
    const FlushDenormals flush;
    for (int64_t part = 0; part < parts; part++) work(part, AHEAD ? part + 1 : parts);
    return;
  }
  auto shared = std::make_shared<Shared>();
  // A task that comes too late finds no part left and touches nothing of the caller's.
  auto take = [shared, parts, &work] {
    const FlushDenormals flush;
    int64_t part = shared->next.fetch_add(1);
    while (part < parts) {
      const int64_t next = AHEAD ? shared->next.fetch_add(1) : parts;
      try {
        work(part, next < parts ? next : parts);
      } catch (...) {  // no memory; the caller's locals stay until all parts are done
        shared->failed = true;
      }
      shared->done.fetch_add(1, std::memory_order_release);
      part = AHEAD ? next : shared->next.fetch_add(1);
    }
  };
  for (int64_t i = 0; i < helpers; i++) pool.Schedule(decltype(take)(take));
  take();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < parts; spins++) {
    if (spins > 4096) std::this_thread::yield();
#if defined(__x86_64__)
    else
      _mm_pause();
#endif
  }
  if (shared->failed) throw std::runtime_error("RESOURCE_EXHAUSTED: no memory for a kernel");
}

// work(part) for every part below `parts`.
template <class Work>
void share(xla::ffi::ThreadPool& pool, int64_t parts, const Work& work) {
  share_out<false>(pool, parts, parts, [&](int64_t part, int64_t) { work(part); });
}

// The same of `count` pieces of work in `parts` runs.
template <class Work>
void share(xla::ffi::ThreadPool& pool, int64_t parts, int64_t count, const Work& work) {
  share(pool, parts, [&](int64_t part) {
    for (int64_t i = count * part / parts; i < count * (part + 1) / parts; i++) work(i);
  });
}

}  // namespace stree
