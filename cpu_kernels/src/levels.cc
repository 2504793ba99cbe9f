#include "levels.h"

#include <algorithm>
#include <string>

#include "handler.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if STREE_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace stree {
namespace {

// Returns the family of an AMD CPU; 0 for other CPUs.
int amd_family() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned a, b, c, d;
  if (!__builtin_cpu_is("amd") || !__get_cpuid(1, &a, &b, &c, &d)) return 0;
  return static_cast<int>((a >> 8 & 0xF) + (a >> 20 & 0xFF));
#else
  return 0;
#endif
}

// True if the CPU has AMX and the Linux kernel grants it to this process, which must ask.
bool has_amx() {
#if STREE_AMX
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const unsigned bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25;
  if ((d & (bf16 | tile | int8)) != (bf16 | tile | int8)) return false;
  constexpr long ASK = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM
  static const bool granted = syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
  return granted;
#else
  return false;
#endif
}

int64_t instructions_here() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  const bool all =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!all) return 1;
  const bool dots =
      __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  return dots && has_amx() ? 3 : 2;
#else
  return 0;
#endif
}

// Cached: on a virtual machine `cpuid` traps to the host, which takes about 20 us.
int64_t instructions() {
  static const int64_t found = instructions_here();
  return found;
}

bool has_bf16() {
#if defined(__x86_64__)
  return instructions() >= 2 && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

bool has_vnni() {
#if defined(__x86_64__)
  return instructions() >= 2 && __builtin_cpu_supports("avx512vnni");
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
#if STREE_AMX
    if (level == 3) {
      kernels.bfloat16 = amx_bfloat16();
      kernels.attention_bfloat16 = amx_attention();
      kernels.int8 = amx_int8();
    }
#endif
    return kernels;
  }
  if (level == 1) return avx2();
#endif
  return portable();
}

}  // namespace

constexpr int ZEN4 = 0x19, ZEN5 = 0x1A;  // families; Zen 3 has the family of Zen 4
const bool into_all_caches = amd_family() >= ZEN5, int8_into_all_caches = amd_family() > 0;
const bool columns_in_order = amd_family() == ZEN4;
const int64_t fetch_ahead_for_few = amd_family() > 0 ? 0 : FETCH_AHEAD;

const Kernels& kernels_of(int64_t level) {
  static const Kernels levels[] = {chosen(0), chosen(1), chosen(2), chosen(3)};
  return levels[std::clamp<int64_t>(level, 0, 3)];
}

// AMX is faster for weights that do not fit in the caches and have long rows. Smaller products
// of few rows are faster without it.
const ProductKernel& float32_product(int64_t level, int64_t m, int64_t k) {
#if STREE_AMX
  constexpr int64_t LARGE = 1 << 20, LONG = 512;
  if (std::min(level, instructions()) >= 3 && m * k >= LARGE && k >= LONG)
    return amx_float32();
#endif
  return kernels_of(level).float32;
}

// Without VNNI, AVX-512 has nothing for packed weights that AVX2 has not.
const PanelProduct* panels_of_level(int64_t level) {
#if defined(__x86_64__)
  level = std::min(level, instructions());
  static const bool f16c = __builtin_cpu_supports("f16c");
#if STREE_AMX
  if (level >= 3) return amx_panels();
#endif
  if (level >= 2 && has_vnni()) return avx512_vnni_panels();
  if (level >= 1 && f16c) return avx2_panels();
#endif
  return portable_panels();
}

// Returns "portable", "avx2", "avx512" or "amx", followed by the machine's extensions.
const char* instruction_names() {
  static const std::string name = [] {
    const char* const names[] = {"portable", "avx2", "avx512", "amx"};
    std::string text = names[instructions()];
    if (has_bf16()) text += " bf16";
    if (has_vnni()) text += " vnni";
    return text;
  }();
  return name.c_str();
}

std::string& kernel_names() {
  static std::string names;
  return names;
}

}  // namespace stree

STREE_PUBLIC const char* stree_instructions() { return stree::instruction_names(); }
STREE_PUBLIC const char* stree_kernels() { return stree::kernel_names().c_str(); }
