// Vectors of float32 as wide as the processor's registers, and the operations that need intrinsics.
//
// Arithmetic, comparisons and selection use the vector extensions of GCC and Clang. The number of lanes differs
// between variants; where it could change a result, SUM_LANES fixes the order of additions.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#else
#error "a variant needs AVX2 or NEON"
#endif

#define ALWAYS_INLINE __attribute__((always_inline))
#define INLINE static inline ALWAYS_INLINE

namespace logprobe {

#if defined(__AVX512F__)
constexpr int LANES = 16, NUM_REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int LANES = 8, NUM_REGISTERS = 16;
#else
constexpr int LANES = 4, NUM_REGISTERS = 32;
#endif
constexpr int SUM_LANES = 64;  // partial sums of a reduction, in every variant
constexpr int LINE = 64;       // bytes of a cache line

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef double Doubles __attribute__((vector_size(8 * LANES / 2)));  // half as many lanes as Floats

constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

INLINE Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
INLINE Ints load_ints(const void* from) {
  Ints x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
INLINE void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }
INLINE Floats broadcast(float x) { return x - Floats{}; }  // x - 0 is x, also for -0
INLINE Ints broadcast(int32_t x) { return x - Ints{}; }
INLINE Ints bits_of(Floats x) { return (Ints)x; }
INLINE Floats floats_of(Ints x) { return (Floats)x; }
INLINE float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
INLINE uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// a * b + c, rounded once.
INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
}

// x > held ? x : held; ignores NaN in `x`, and keeps NaN in `held`.
INLINE float greater(float x, float held) { return x > held ? x : held; }
INLINE Floats greater(Floats x, Floats held) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)x, (__m512)held);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)x, (__m256)held);
#else
  return x > held ? x : held;
#endif
}

// True if a comparison holds in any lane.
INLINE bool any(Ints comparison) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)comparison, (__m512i)comparison) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)comparison, (__m256i)comparison);
#else
  return vmaxvq_u32((uint32x4_t)comparison) != 0;
#endif
}

INLINE Floats load_float16(const void* from) {
#if defined(__AVX512F__)
  __m256i bits;
  std::memcpy(&bits, from, sizeof bits);
  return (Floats)_mm512_cvtph_ps(bits);
#elif defined(__AVX2__)
  __m128i bits;
  std::memcpy(&bits, from, sizeof bits);
  return (Floats)_mm256_cvtph_ps(bits);
#else
  float16x4_t halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Floats)vcvt_f32_f16(halves);
#endif
}

INLINE Floats load_int8(const void* from) {
#if defined(__AVX512F__)
  __m128i bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(__AVX2__)
  __m128i bytes = _mm_loadl_epi64((const __m128i*)from);
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
  int32_t bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  int16x8_t shorts = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(bytes)));
  return (Floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(shorts)));
#endif
}

// Bits [4 * place, 4 * place + 4) of each lane, as numbers from 0 to 15.
template <int place>
INLINE Floats int4(Ints bits) {
#if defined(__AVX512F__)
  const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (Floats)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)bits, 4 * place), numbers);
#elif defined(__AVX2__)
  __m256i number = _mm256_and_si256(_mm256_srli_epi32((__m256i)bits, 4 * place), _mm256_set1_epi32(15));
  return (Floats)_mm256_cvtepi32_ps(number);
#else
  uint32x4_t shifted = place ? vshrq_n_u32((uint32x4_t)bits, place ? 4 * place : 1) : (uint32x4_t)bits;
  return (Floats)vcvtq_f32_u32(vandq_u32(shifted, vdupq_n_u32(15)));
#endif
}

// Load four numbers from each of LANES / 4 row pointers, which are `step` apart in `rows`.
INLINE Floats load_fours(const float* const* rows, int step) {
#if defined(__AVX512F__)
  __m512 x = _mm512_castps128_ps512(_mm_loadu_ps(rows[0]));
  x = _mm512_insertf32x4(x, _mm_loadu_ps(rows[step]), 1);
  x = _mm512_insertf32x4(x, _mm_loadu_ps(rows[2 * step]), 2);
  return (Floats)_mm512_insertf32x4(x, _mm_loadu_ps(rows[3 * step]), 3);
#elif defined(__AVX2__)
  const __m256 x = _mm256_castps128_ps256(_mm_loadu_ps(rows[0]));
  return (Floats)_mm256_insertf128_ps(x, _mm_loadu_ps(rows[step]), 1);
#else
  (void)step;
  return load(rows[0]);
#endif
}

// Transpose each 4 x 4 block that four vectors hold in four adjacent lanes.
INLINE void transpose_fours(const Floats x[4], Floats out[4]) {
#if defined(__AVX512F__)
  const __m512d low = (__m512d)_mm512_unpacklo_ps((__m512)x[0], (__m512)x[1]);
  const __m512d high = (__m512d)_mm512_unpackhi_ps((__m512)x[0], (__m512)x[1]);
  const __m512d other_low = (__m512d)_mm512_unpacklo_ps((__m512)x[2], (__m512)x[3]);
  const __m512d other_high = (__m512d)_mm512_unpackhi_ps((__m512)x[2], (__m512)x[3]);
  out[0] = (Floats)_mm512_unpacklo_pd(low, other_low), out[1] = (Floats)_mm512_unpackhi_pd(low, other_low);
  out[2] = (Floats)_mm512_unpacklo_pd(high, other_high), out[3] = (Floats)_mm512_unpackhi_pd(high, other_high);
#elif defined(__AVX2__)
  const __m256d low = (__m256d)_mm256_unpacklo_ps((__m256)x[0], (__m256)x[1]);
  const __m256d high = (__m256d)_mm256_unpackhi_ps((__m256)x[0], (__m256)x[1]);
  const __m256d other_low = (__m256d)_mm256_unpacklo_ps((__m256)x[2], (__m256)x[3]);
  const __m256d other_high = (__m256d)_mm256_unpackhi_ps((__m256)x[2], (__m256)x[3]);
  out[0] = (Floats)_mm256_unpacklo_pd(low, other_low), out[1] = (Floats)_mm256_unpackhi_pd(low, other_low);
  out[2] = (Floats)_mm256_unpacklo_pd(high, other_high), out[3] = (Floats)_mm256_unpackhi_pd(high, other_high);
#else
  const float64x2_t low = vreinterpretq_f64_f32(vzip1q_f32((float32x4_t)x[0], (float32x4_t)x[1]));
  const float64x2_t high = vreinterpretq_f64_f32(vzip2q_f32((float32x4_t)x[0], (float32x4_t)x[1]));
  const float64x2_t other_low = vreinterpretq_f64_f32(vzip1q_f32((float32x4_t)x[2], (float32x4_t)x[3]));
  const float64x2_t other_high = vreinterpretq_f64_f32(vzip2q_f32((float32x4_t)x[2], (float32x4_t)x[3]));
  out[0] = (Floats)vzip1q_f64(low, other_low), out[1] = (Floats)vzip2q_f64(low, other_low);
  out[2] = (Floats)vzip1q_f64(high, other_high), out[3] = (Floats)vzip2q_f64(high, other_high);
#endif
}

INLINE Doubles low_doubles(Floats x) {
#if defined(__AVX512F__)
  return (Doubles)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x));
#elif defined(__AVX2__)
  return (Doubles)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x));
#else
  return (Doubles)vcvt_f64_f32(vget_low_f32((float32x4_t)x));
#endif
}
INLINE Doubles high_doubles(Floats x) {
#if defined(__AVX512F__)
  return (Doubles)_mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)(__m512)x, 1)));
#elif defined(__AVX2__)
  return (Doubles)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1));
#else
  return (Doubles)vcvt_high_f64_f32((float32x4_t)x);
#endif
}

// e**d for d in [-87, 0], relative error under 2e-7 + 1.4e-8 |d|; NaN for NaN. Lower d are clamped to -87,
// where e**d is about the smallest normal number. For r in [-0.5, 0.5], (2**r - 1) / r is a polynomial of degree 4.
constexpr float LOWEST = -87.0f;
template <typename T, typename Bits>
INLINE T exponential(T d) {
  const T zero = T{}, log2_e = 1.4426950408889634f - zero;
  const T round = (12582912.0f + 127.0f) - zero;  // 1.5 * 2**23: adding it rounds; 127: the exponent's bias
  d = greater(LOWEST - zero, d);
  const T shifted = fma(d, log2_e, round);
  const T rest = fma(d, log2_e, round - shifted);
  T value = fma(0.001326472731307149f - zero, rest, 0.009671512991189957f - zero);
  value = fma(value, rest, 0.05550733581185341f - zero);
  value = fma(value, rest, 0.24022242426872253f - zero);
  value = fma(value, rest, 0.6931470036506653f - zero);
  value = fma(value, rest, 1.0f - zero);
  Bits exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  exponent = exponent << 23;
  T power;
  std::memcpy(&power, &exponent, sizeof power);
  return value * power;
}
INLINE Floats exponential(Floats d) { return exponential<Floats, Ints>(d); }
INLINE float exponential(float d) { return exponential<float, uint32_t>(d); }

// tanh, relative error under 2e-7. Unlike those of C libraries, it gives the same bits on every platform. The
// polynomial is from Cephes' tanhf.
template <typename T>
INLINE T tanh(T x) {
  const T zero = T{}, one = 1.0f - zero, square = x * x;
  T small = fma(-5.70498872745e-3f - zero, square, 2.06390887954e-2f - zero);
  small = fma(small, square, -5.37397155531e-2f - zero);
  small = fma(small, square, 1.33314422036e-1f - zero);
  small = fma(small, square, -3.33332819422e-1f - zero);
  small = fma(x * square, small, x);
  const T size = x < zero ? -x : x;
  const T e = exponential(-2.0f * size);
  const T large = (one - e) / (one + e);
  return size < 0.625f - zero ? small : x < zero ? -large : large;
}

// SUM_LANES partial sums; number i is added in lane i % SUM_LANES. Every variant does the same additions.
struct PartialSums {
  static constexpr int NUM = SUM_LANES / LANES;
  Floats parts[NUM] = {};

  // Add the four groups of 16 sums in order, then fold halves until one number is left.
  float total() const {
    float sums[SUM_LANES];
    for (int i = 0; i < NUM; i++) store(sums + LANES * i, parts[i]);
    for (int i = 0; i < 16; i++) sums[i] = ((sums[i] + sums[16 + i]) + sums[32 + i]) + sums[48 + i];
    for (int size = 8; size > 0; size /= 2)
      for (int i = 0; i < size; i++) sums[i] += sums[size + i];
    return sums[0];
  }
};

// Sum COUNT terms over an array. `terms(x, found)` computes the terms of x, which is Floats, or float for the
// last numbers.
template <int COUNT, typename Terms>
INLINE void sums_of(const float* x, int64_t size, float (&totals)[COUNT], Terms terms) {
  PartialSums sums[COUNT];
  const int64_t whole = size / SUM_LANES * SUM_LANES;
  for (int64_t start = 0; start < whole; start += SUM_LANES)
    for (int i = 0; i < PartialSums::NUM; i++) {
      Floats found[COUNT];
      terms(load(x + start + LANES * i), found);
      for (int term = 0; term < COUNT; term++) sums[term].parts[i] += found[term];
    }
  for (int term = 0; term < COUNT; term++) totals[term] = sums[term].total();
  for (int64_t i = whole; i < size; i++) {
    float found[COUNT];
    terms(x[i], found);
    for (int term = 0; term < COUNT; term++) totals[term] += found[term];
  }
}

template <typename Term>
INLINE float sum_of(const float* x, int64_t size, Term term) {
  float total[1];
  sums_of(x, size, total, [&](auto number, auto* found) ALWAYS_INLINE { found[0] = term(number); });
  return total[0];
}

template <int LOCALITY = 3>  // 3: into the L1 cache, 2: into L2
INLINE void prefetch(const void* address) {
  __builtin_prefetch(address, 0, LOCALITY);
}

}  // namespace logprobe
