#ifndef TR_RUNG
#include "core/peaks.h"

#define TR_SOURCE "core/peaks_vectors.cpp"
#include "simd/foreach_isa.h"

#else

namespace tilerank::TR_RUNG {

static inline Vec add_product(float, Vec sum, Vec a, Vec b) { return fma(a, b, sum); }

// On rungs without products of bf16, bf16 is widened and multiplied in fp32.
static inline Vec add_product(bf16, Vec sum, Vec a, Vec b) {
#ifdef TR_BF16
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)};
#else
  return fma(a, b, sum);
#endif
}

static inline Vec add_product(int8_t, Vec sum, Vec a, Vec b) {
#ifdef TR_AVX512
  const __m512i x = _mm512_castps_si512(a.v), y = _mm512_castps_si512(b.v);
  return {_mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(sum.v), x, y))};
#else
  const __m256i pairs = _mm256_madd_epi16(_mm256_castps_si256(a.v), _mm256_castps_si256(b.v));
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(sum.v), pairs))};
#endif
}

// Number of inputs that one product adds to the sum of a lane.
template <class T>
constexpr int kInputs = 1;
#ifdef TR_BF16
template <>
constexpr int kInputs<bf16> = 2;
#endif
template <>
constexpr int kInputs<int8_t> = kLanes == 16 ? 4 : 2;

// Twelve independent sums: more than the latency of a product divided by its throughput, and few enough for 16
// registers to hold them and the operands.
template <class T>
static double multiply(int64_t rounds) {
  constexpr int kSums = 12;
  Vec sums[kSums], a = set(1), b = set(1);
  std::fill_n(sums, kSums, zero());
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int s = 0; s < kSums; ++s) {
      asm("" : "+x"(a.v));  // hides that `a` is unchanged: GCC would compute an integer product once for all sums
      sums[s] = add_product(T{}, sums[s], a, b);
    }
  }
#pragma GCC unroll 12
  for (int s = 0; s < kSums; ++s) asm volatile("" : : "x"(sums[s].v));  // keeps the sums alive
  return static_cast<double>(rounds * kSums) * kLanes * kInputs<T> * 2;
}

double multiply_vectors(int64_t rounds, DType operands) {
  if (operands == DType::i8) return multiply<int8_t>(rounds);
  return operands == DType::bf16 ? multiply<bf16>(rounds) : multiply<float>(rounds);
}

}  // namespace tilerank::TR_RUNG
#endif
