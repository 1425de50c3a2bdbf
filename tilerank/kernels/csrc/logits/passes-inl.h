// What vectors do with a piece of a row of logits, whose groups logits/candidates.h describes.

namespace tilerank::TR_RUNG {

// Computes the maximum of each group of x[n], as ordered() maps it, kGroups for each span; a NaN is noted as kNan.
static inline void largest_of_groups(const float* x, int64_t n, int32_t* largest) {
  int32_t high[kGroups], low[kGroups];
  std::fill_n(high, kGroups, std::numeric_limits<int32_t>::min());
  std::fill_n(low, kGroups, std::numeric_limits<int32_t>::max());
  int32_t* group = largest;
  for (int64_t begin = 0; begin < n; begin += kSpan, group += kGroups) {
    int32_t of_span[kGroups];
    std::fill_n(of_span, kGroups, std::numeric_limits<int32_t>::min());
    const auto look = [&](int64_t i, int64_t lane) {
      const int32_t value = ordered(x[i + lane]);
      of_span[lane] = std::max(of_span[lane], value);
      low[lane] = std::min(low[lane], value);
    };
    const int64_t end = std::min(begin + kSpan, n);
    int64_t i = begin;
    for (; i + kGroups <= end; i += kGroups) {
      for (int64_t lane = 0; lane < kGroups; ++lane) look(i, lane);
    }
    for (int64_t lane = 0; lane < end - i; ++lane) look(i, lane);
    for (int64_t lane = 0; lane < kGroups; ++lane) {
      group[lane] = of_span[lane];
      high[lane] = std::max(high[lane], of_span[lane]);
    }
  }
  for (int64_t lane = 0; lane < kGroups; ++lane) {
    if (high[lane] > ordered_infinity || low[lane] < ~ordered_infinity) largest[0] = kNan;
  }
}

#ifdef TR_AVX512
constexpr int64_t kDoubles = 8;
using Doubles = __m512d;
using Longs = __m512i;
static inline Doubles all(double x) { return _mm512_set1_pd(x); }
static inline Doubles widen(const float* x) { return _mm512_cvtps_pd(_mm256_loadu_ps(x)); }
static inline void store(double* p, Doubles x) { _mm512_storeu_pd(p, x); }
static inline void store(int64_t* p, Longs x) { _mm512_storeu_si512(p, x); }
static inline Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
static inline Doubles max(Doubles a, Doubles b) { return _mm512_max_pd(a, b); }
static inline Doubles min(Doubles a, Doubles b) { return _mm512_min_pd(a, b); }
// a where x >= least, else 0
static inline Doubles where_at_least(Doubles x, Doubles least, Doubles a) {
  return _mm512_maskz_mov_pd(_mm512_cmp_pd_mask(x, least, _CMP_GE_OQ), a);
}
#else
constexpr int64_t kDoubles = 4;
using Doubles = __m256d;
using Longs = __m256i;
static inline Doubles all(double x) { return _mm256_set1_pd(x); }
static inline Doubles widen(const float* x) { return _mm256_cvtps_pd(_mm_loadu_ps(x)); }
static inline void store(double* p, Doubles x) { _mm256_storeu_pd(p, x); }
static inline void store(int64_t* p, Longs x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
static inline Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm256_fmadd_pd(a, b, c); }
static inline Doubles max(Doubles a, Doubles b) { return _mm256_max_pd(a, b); }
static inline Doubles min(Doubles a, Doubles b) { return _mm256_min_pd(a, b); }
static inline Doubles where_at_least(Doubles x, Doubles least, Doubles a) {
  return _mm256_and_pd(_mm256_cmp_pd(x, least, _CMP_GE_OQ), a);
}
#endif

constexpr double kShift = 0x1.8p52;  // a sum with it has the rounded number in its low bits

// The rounded numbers from 0 to 2^51, as integers.
static inline Longs rounded(Doubles x) { return (Longs)(x + kShift) - (Longs)all(kShift); }

// e^y for y <= 0, within the last bits of double; 0 where a double has fewer of them. The Taylor series of the rest r
// is two polynomials in r * r, which processors compute side by side.
static inline Doubles exp_of_negative(Doubles y) {
  const Doubles clamped = max(y, all(-708.0)), shifted = fma(clamped, all(0x1.71547652b82fep0), all(kShift));
  const Doubles whole = shifted - kShift;
  // ln 2 in two parts
  const Doubles r = fma(whole, all(-0x1.a39ef35793c76p-33), fma(whole, all(-0x1.62e42fee00000p-1), clamped));
  const Doubles square = r * r;
  Doubles even = all(1.0 / 479001600), odd = all(1.0 / 39916800);
  for (const double c : {1.0 / 3628800, 1.0 / 40320, 1.0 / 720, 1.0 / 24, 0.5, 1.0}) even = fma(even, square, all(c));
  for (const double c : {1.0 / 362880, 1.0 / 5040, 1.0 / 120, 1.0 / 6, 1.0}) odd = fma(odd, square, all(c));
  const auto power = (Doubles)(((Longs)shifted + 1023) << 52);
  return where_at_least(y, all(-708.0), fma(odd, r, even) * power);
}

// y: the exponents of the logits.
static inline Doubles weights_of(Doubles logits, const Weighing& weighing, Doubles y) {
  return where_at_least(logits, all(weighing.floor), exp_of_negative(y));
}

// Calls f(i, x) for every kDoubles of n logits; after the last one, x is -infinity.
template <class F>
static inline void for_doubles(const float* x, int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kDoubles <= n; i += kDoubles) f(i, widen(x + i));
  if (i == n) return;
  float rest[kDoubles];
  std::fill_n(rest, kDoubles, -std::numeric_limits<float>::infinity());
  std::copy_n(x + i, n - i, rest);
  f(i, widen(rest));
}

// Returns the sum of the weights of n logits.
static inline double sum_of_weights(const float* x, int64_t n, const Weighing& weighing) {
  constexpr int64_t kChains = 16;
  Doubles chains[kChains / kDoubles] = {};
  for_doubles(x, n, [&](int64_t i, Doubles logits) {
    const Doubles y = (logits - weighing.largest) * weighing.inverse_temperature;
    chains[i % kChains / kDoubles] += weights_of(logits, weighing, y);
  });
  double sums[kChains], sum = 0;
  for (int64_t i = 0; i < kChains; i += kDoubles) store(sums + i, chains[i / kDoubles]);
  for (const double each : sums) sum += each;
  return sum;
}

}  // namespace tilerank::TR_RUNG
