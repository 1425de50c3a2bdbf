#ifndef TR_RUNG
#include <array>

#include "core/peaks.h"

#undef TR_LEFT_OUT  // what follows is called by the name of its rung
#define TR_SOURCE "core/peaks_vectors.cpp"
#include "simd/foreach_isa.h"

#else
#include "simd/blocks-inl.h"

namespace tilerank::TR_RUNG {

static inline Vec add_product(float, Vec sum, Vec a, Vec b) { return fma(a, b, sum); }

// On rungs without products of bf16, bf16 is widened and multiplied in fp32.
static inline Vec add_product(bf16, Vec sum, Vec a, Vec b) {
#ifdef TR_BF16
  return add_dot(sum, bits_of(a), bits_of(b));
#else
  return fma(a, b, sum);
#endif
}

static inline Vec add_product(int8_t, Vec sum, Vec a, Vec b) {
#ifdef TR_AVX512
  return vec_of(add_dot(bits_of(sum), bits_of(a), bits_of(b)));
#else
  return vec_of(add(bits_of(sum), dot(bits_of(a), bits_of(b))));
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
