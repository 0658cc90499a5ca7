// Compiled for any processor of the architecture: whether this one has the variant's instructions.
#include "common.hpp"

#if defined(__clang__)
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif

EXPORT int logprobe_can_run() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool can_run_v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi") &&
                          __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt");
#if defined(VARIANT_v4)
  return can_run_v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
#else
  return can_run_v3;
#endif
#else
  return 1;
#endif
}

EXPORT const char* logprobe_compiler() { return COMPILER; }
