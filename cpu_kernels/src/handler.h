// Registers kernels as XLA custom calls (FFI handlers).
#pragma once
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "work.h"

namespace stree {

using F32 = xla::ffi::Buffer<xla::ffi::F32>;
using S32 = xla::ffi::Buffer<xla::ffi::S32>;
using U32 = xla::ffi::Buffer<xla::ffi::U32>;
using S8 = xla::ffi::Buffer<xla::ffi::S8>;
using U8 = xla::ffi::Buffer<xla::ffi::U8>;
using Bool = xla::ffi::Buffer<xla::ffi::PRED>;
using Any = xla::ffi::AnyBuffer;
template <class Array>
using Out = xla::ffi::Result<Array>;

inline xla::ffi::Error refused(const char* why) {
  return xla::ffi::Error::InvalidArgument(why);
}

template <class T>
struct ResultOf {
  static constexpr bool is_result = false;
};
template <class T>
struct ResultOf<xla::ffi::Result<T>> {
  static constexpr bool is_result = true;
  using Array = T;
};

using Names = std::vector<const char*>;

template <class...>
struct Parameters {};

// Derives an FFI binding from the kernel's parameter types: buffers are arguments, `Result`s
// are results, and numbers are attributes with the `names` in order.
template <class Binding, class Kernel>
xla::ffi::Ffi* bound(Binding&& binding, Parameters<>, const char* const*, Kernel run) {
  return std::move(binding).To(run).release();
}
template <class Binding, class T, class... Rest, class Kernel>
xla::ffi::Ffi* bound(Binding&& binding, Parameters<T, Rest...>, const char* const* names,
                     Kernel run) {
  constexpr Parameters<Rest...> rest;
  if constexpr (std::is_arithmetic_v<T>)
    return bound(std::move(binding).template Attr<T>(*names), rest, names + 1, run);
  else if constexpr (ResultOf<T>::is_result)
    return bound(std::move(binding).template Ret<typename ResultOf<T>::Array>(), rest, names,
                 run);
  else
    return bound(std::move(binding).template Arg<T>(), rest, names, run);
}

// Returns a kernel's handler. A parallel kernel takes the thread pool as its first parameter
// and the level as its last one. Any other kernel is serial; its handler keeps a pool thread
// awake for the next kernel.
template <class Done, class First, class... Args>
xla::ffi::Ffi* handler_of(Done (*run)(First, Args...), Names names) {
  using Pool = xla::ffi::ThreadPool;
  names.push_back("level");
  auto&& binding = xla::ffi::Ffi::Bind().Ctx<Pool>();
  if constexpr (std::is_same_v<First, Pool>) {
    return bound(std::move(binding), Parameters<Args...>{}, names.data(), run);
  } else {
    const auto awake = [run](Pool pool, First first, Args... args, int64_t) {
      keep_awake(pool);
      return run(first, args...);
    };
    return bound(std::move(binding), Parameters<First, Args..., int64_t>{}, names.data(), awake);
  }
}

// The names of all kernels of this library, each followed by a space. Python registers them.
std::string& kernel_names();

struct Listed {
  explicit Listed(const char* name) { kernel_names().append(name).append(" "); }
};

}  // namespace stree

// Exports the kernel stree::NAME as stree_NAME. The other arguments name its attributes.
#define STREE_KERNEL(NAME, ...)                                                    \
  STREE_PUBLIC XLA_FFI_Error* stree_##NAME(XLA_FFI_CallFrame* frame) {             \
    static const auto* handler = stree::handler_of(stree::NAME, {__VA_ARGS__});    \
    return handler->Call(frame);                                                   \
  }                                                                                \
  static const stree::Listed listed_##NAME("stree_" #NAME);
