#include "levels.h"

#include <algorithm>
#include <string>

#include "work.h"

namespace stree {
namespace {

int64_t instructions() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  const bool all =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return all ? 2 : 1;
#else
  return 0;
#endif
}

bool has_bf16() {
#if defined(__x86_64__)
  return instructions() == 2 && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

bool has_vnni() {
#if defined(__x86_64__)
  return instructions() == 2 && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

Kernels chosen(int64_t level) {
  level = std::min(level, instructions());
#if defined(__x86_64__)
  if (level >= 2) {
    Kernels kernels = avx512();
    if (has_bf16()) {
      kernels.bfloat16 = avx512_bf16();
      kernels.attention_bfloat16 = avx512_bf16_attention();
    }
    kernels.int8 = has_vnni() ? avx512_vnni() : avx2().int8;
    return kernels;
  }
  if (level == 1) return avx2();
#endif
  return portable();
}

}  // namespace

const Kernels& kernels_of(int64_t level) {
  static const Kernels levels[] = {chosen(0), chosen(1), chosen(2)};
  return levels[std::clamp<int64_t>(level, 0, 2)];
}

// "portable", "avx2" or "avx512", and what this machine has besides.
const char* instruction_names() {
  static const std::string name = [] {
    const char* const names[] = {"portable", "avx2", "avx512"};
    std::string text = names[instructions()];
    if (has_bf16()) text += " bf16";
    if (has_vnni()) text += " vnni";
    return text;
  }();
  return name.c_str();
}

}  // namespace stree

STREE_PUBLIC const char* stree_instructions() { return stree::instruction_names(); }
