// Detects whether this processor has the variant's instructions; compiled for any processor of the architecture.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "common.hpp"

#if defined(__clang__)
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif

#if defined(__x86_64__)
namespace {

// Uses cpuid, because zig's __builtin_cpu_supports always returns false.
bool has_instructions() {
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned FMA = 1u << 12, MOVBE = 1u << 22, OSXSAVE = 1u << 27, AVX = 1u << 28, F16C = 1u << 29;
  constexpr unsigned WANTED = FMA | MOVBE | OSXSAVE | AVX | F16C;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & WANTED) != WANTED) return false;
  unsigned saved, high;  // register sets that the system saves on a context switch
  asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned BMI1 = 1u << 3, AVX2 = 1u << 5, BMI2 = 1u << 8;
#if defined(VARIANT_v4)
  constexpr unsigned F = 1u << 16, DQ = 1u << 17, CD = 1u << 28, BW = 1u << 30, VL = 1u << 31;
  constexpr unsigned FEATURES = BMI1 | AVX2 | BMI2 | F | DQ | CD | BW | VL, REGISTERS = 0xE6;
#else
  constexpr unsigned FEATURES = BMI1 | AVX2 | BMI2, REGISTERS = 0x6;
#endif
  return (ebx & FEATURES) == FEATURES && (saved & REGISTERS) == REGISTERS &&
         __get_cpuid(0x80000001, &eax, &ebx, &ecx, &edx) && (ecx & 1u << 5);  // LZCNT
}

}  // namespace
#endif

EXPORT int logprobe_can_run() {
#if defined(__x86_64__)
  return has_instructions();
#else
  return 1;
#endif
}

EXPORT const char* logprobe_compiler() { return COMPILER; }
