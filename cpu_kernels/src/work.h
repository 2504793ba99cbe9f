// Divides work among the threads of XLA's pool.
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

// Smallest part of work that is worth a task for another thread: bytes of weights to read, and
// numbers to process.
constexpr int64_t PART_BYTES = 1 << 15;
constexpr int64_t NUMBERS = 1 << 14;
constexpr int64_t PARTS_A_THREAD = 4;

// Returns the number of parts, of whole rows, for `rows` rows of n numbers.
inline int64_t row_parts(int64_t rows, int64_t n) {
  return std::max<int64_t>(1, std::min(rows, rows * n / NUMBERS));
}

// Copies `before` to `after`, unless XLA has aliased them to the same memory. Returns `after`.
template <class Before, class After>
char* kept(const Before& before, After& after) {
  if (before.untyped_data() != after->untyped_data())
    std::memcpy(after->untyped_data(), before.untyped_data(), before.size_bytes());
  return static_cast<char*>(after->untyped_data());
}

// The valid rows among rows [B, T]: the first counts[b] of each batch row, or all rows if `counts`
// is empty. The rest is padding, for which kernels compute and write nothing.
class ValidRows {
 public:
  ValidRows(const xla::ffi::Buffer<xla::ffi::S32>& counts, int64_t rows)
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

// Flushes denormal numbers to 0 in this scope. Pool threads and callers may have different
// settings, and results must not depend on the thread.
class FlushDenormals {
#if defined(__x86_64__)
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(0x9FC0); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#endif
};

// Returns a scratch buffer of this thread, aligned to 64 bytes. It grows and is reused; each PLACE
// has its own buffer.
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

// True if this thread belongs to the pool.
inline thread_local bool in_pool = false;

// Makes the rest of the program continue in a thread of the pool.
//
// XLA starts a program in a separate thread and may stay there. Together with the pool that is
// one thread more than there are cores: one pool thread spins for work while the others sleep,
// and Eigen wakes a sleeping one for every task.
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

// Gives a pool thread an empty task, so that it is awake when there is work. Waking a thread can
// take as long as a small product (40 us on a virtual machine), and delays the thread that has the
// work.
inline void keep_awake(xla::ffi::ThreadPool& pool) {
  if (pool.num_threads() > 1) pool.Schedule([] {});
}

// Calls work(part, next) for every part below `parts`, in this thread and up to `threads` - 1 pool
// threads. With AHEAD, for many small parts, a thread takes its next part before it computes this
// one, and passes it as `next`. Otherwise, or if there is no next part, `next` is `parts`.
//
// A free thread takes the next part. The caller takes parts, too, so it never waits for a task
// that has not begun: the caller may itself be a pool thread.
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
  // A task that starts too late finds no part left and does not touch the caller's variables.
  auto take = [shared, parts, &work] {
    const FlushDenormals flush;
    int64_t part = shared->next.fetch_add(1);
    while (part < parts) {
      const int64_t next = AHEAD ? shared->next.fetch_add(1) : parts;
      try {
        work(part, next < parts ? next : parts);
      } catch (...) {  // out of memory; the caller's variables live until all parts are done
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
  if (shared->failed) throw std::runtime_error("RESOURCE_EXHAUSTED: a kernel ran out of memory");
}

// Calls work(part) for every part below `parts`.
template <class Work>
void share(xla::ffi::ThreadPool& pool, int64_t parts, const Work& work) {
  share_out<false>(pool, parts, parts, [&](int64_t part, int64_t) { work(part); });
}

// Calls work(i) for every i below `count`, in `parts` consecutive runs.
template <class Work>
void share(xla::ffi::ThreadPool& pool, int64_t parts, int64_t count, const Work& work) {
  share(pool, parts, [&](int64_t part) {
    for (int64_t i = count * part / parts; i < count * (part + 1) / parts; i++) work(i);
  });
}

}  // namespace stree
