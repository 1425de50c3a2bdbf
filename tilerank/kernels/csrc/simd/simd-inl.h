// A vector of kLanes floats for the rung that includes this file (foreach_isa.h does, once per rung: no include guard).
//
//   Vec v = load(p)        p is const float*, bf16* or int8_t*, unaligned; load(p, n) of the first two reads only the
//                          first n (others 0)
//   store(p, v)            rounds to nearest even if p is bf16*; store(p, v, n) writes only the first n
//   round_to<T>(v)         v rounded to T (float, bf16), as a store and a load would
//   for_lanes(n, f)        calls f(i, lanes) for every vector of n elements, of which the last may be partial, with
//                          lanes.load(p) and lanes.store(p, v)
//   set(x) zero() + - * / fma(a, b, c) = a * b + c   max min sqrt exp(v) silu(v) sum(v) max_of(v)
//
// In the partial forms n is 1..kLanes. Sums run in a fixed order, so that a row's result never depends on other rows.

namespace tilerank::TR_RUNG {

#ifdef TR_AVX512

constexpr int kLanes = 16;
struct Vec {
  __m512 v;
};
static inline __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
static inline Vec zero() { return {_mm512_setzero_ps()}; }
static inline Vec set(float x) { return {_mm512_set1_ps(x)}; }
static inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline Vec load(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
static inline Vec widen(__m256i half) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
static inline Vec load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
static inline Vec load(const bf16* p, int64_t n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
static inline Vec load(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// Rounds numbers to nearest even in the upper half: adds half of the last kept bit, less one if that bit is even.
static inline __m512i rounded_number(Vec x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
}
static inline __mmask16 is_nan(Vec x) { return _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q); }
#ifdef TR_BF16
// vcvtneps2bf16 treats subnormal inputs as zero, as AMX and vdpbf16ps do.
static inline __m256i narrow(Vec x) { return (__m256i)_mm512_cvtneps_pbh(x.v); }
static inline __m512i narrow(Vec left, Vec right) { return (__m512i)_mm512_cvtne2ps_pbh(right.v, left.v); }
#else
// A NaN keeps its top bits and becomes quiet.
static inline __m512i rounded_bits(Vec x) {
  const __m512i quiet = _mm512_set1_epi32(0x400000);
  return _mm512_mask_or_epi32(rounded_number(x), is_nan(x), _mm512_castps_si512(x.v), quiet);
}
static inline __m256i narrow(Vec x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bits(x), 16)); }
static inline __m512i narrow(Vec left, Vec right) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(narrow(left)), narrow(right), 1);
}
#endif
static inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
static inline void store(float* p, Vec x, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), x.v); }
static inline void store(bf16* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
static inline void store(bf16* p, Vec x, int64_t n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(x)); }
static inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline Vec sqrt(Vec a) { return {_mm512_sqrt_ps(a.v)}; }
static inline float first_of(Vec a) { return _mm512_cvtss_f32(a.v); }
static inline float sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
static inline float max_of(Vec a) { return _mm512_reduce_max_ps(a.v); }
static inline Vec round_to_int(Vec a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// x * 2^n for integral n
static inline Vec scale_by_power(Vec x, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }

#else

constexpr int kLanes = 8;
struct Vec {
  __m256 v;
};
static inline __m256i first_lanes(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline Vec zero() { return {_mm256_setzero_ps()}; }
static inline Vec set(float x) { return {_mm256_set1_ps(x)}; }
static inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
static inline Vec load(const float* p, int64_t n) { return {_mm256_maskload_ps(p, first_lanes(n))}; }
static inline Vec widen(__m128i half) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
}
static inline Vec load(const bf16* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
static inline Vec load(const bf16* p, int64_t n) {
  alignas(16) uint16_t part[8] = {};
  std::memcpy(part, p, static_cast<size_t>(n) * 2);
  return widen(_mm_load_si128(reinterpret_cast<const __m128i*>(part)));
}
static inline Vec load(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
// Rounds to nearest even: adds half of the last kept bit, less one if that bit is even. A NaN keeps its top bits and
// becomes quiet.
static inline __m128i narrow(Vec x) {
  const __m256i bits = _mm256_castps_si256(x.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), nan);
  const __m256i high = _mm256_srli_epi32(rounded, 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
static inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x.v); }
static inline void store(float* p, Vec x, int64_t n) { _mm256_maskstore_ps(p, first_lanes(n), x.v); }
static inline void store(bf16* p, Vec x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x)); }
static inline void store(bf16* p, Vec x, int64_t n) {
  alignas(16) uint16_t part[8];
  _mm_store_si128(reinterpret_cast<__m128i*>(part), narrow(x));
  std::memcpy(p, part, static_cast<size_t>(n) * 2);
}
static inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
static inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
static inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
static inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
static inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
static inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
static inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
static inline Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.v)}; }
static inline float sum(Vec a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float max_of(Vec a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
static inline Vec round_to_int(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// x * 2^n for integral n in [-252, 254], in two steps so that neither factor leaves the normal range
static inline Vec scale_by_power(Vec x, Vec n) {
  const __m256i whole = _mm256_cvtps_epi32(n.v);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  const __m256i rest = _mm256_sub_epi32(whole, half);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256 a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const __m256 b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
  return {_mm256_mul_ps(_mm256_mul_ps(x.v, a), b)};
}

#endif

// e^x within 2 units in the last place; exp(-inf) = 0, infinity above 88.73, NaN stays NaN.
// Cephes: x = n ln 2 + r with |r| <= ln 2 / 2 and ln 2 in two pieces, then a polynomial in r.
static inline Vec exp(Vec x) {
  // The operand order matters: the instruction returns its second operand if either is NaN.
  x = min(set(89.0f), max(set(-110.0f), x));
  const Vec n = round_to_int(x * set(1.44269504088896341f));
  Vec r = fma(n, set(-0.693359375f), x);
  r = fma(n, set(2.12194440e-4f), r);
  Vec p = set(1.9875691500e-4f);
  p = fma(p, r, set(1.3981999507e-3f));
  p = fma(p, r, set(8.3334519073e-3f));
  p = fma(p, r, set(4.1665795894e-2f));
  p = fma(p, r, set(1.6666665459e-1f));
  p = fma(p, r, set(5.0000001201e-1f));
  p = fma(p, r * r, r) + set(1.0f);
  return scale_by_power(p, n);
}

// x / (1 + e^-x)
#ifdef TR_AVX512
// Computes 1 + e^-x as exp does, with a shorter polynomial (within 8e-8). The division would take as long as all the
// rest, so a 14-bit reciprocal and a Newton step replace it.
static inline Vec silu(Vec x) {
  constexpr float kLeast = -88.72f;                    // below, e^-x exceeds fp32 and the result is -0
  const Vec z = min(set(88.0f), max(set(kLeast), x));  // NaN stays NaN
  const Vec n = round_to_int(z * set(-1.44269504088896341f));
  Vec r = fma(n, set(0.693359375f), z);
  r = fma(n, set(-2.12194440e-4f), r);
  Vec p = set(-0.008297619471f);
  p = fma(p, r, set(0.04191562925f));
  p = fma(p, r, set(-0.1666757654f));
  p = fma(p, r, set(0.4999889266f));
  p = fma(p, r, set(-0.9999996911f));
  p = fma(p, r, set(1.000000072f));
  const Vec d = set(1.0f) + scale_by_power(p, n);
  const __m512 y = _mm512_rcp14_ps(d.v);
  const __mmask16 inside = _mm512_cmp_ps_mask(x.v, set(kLeast).v, _CMP_NLT_UQ);
  return x * Vec{_mm512_maskz_fmadd_ps(inside, y, _mm512_fnmadd_ps(d.v, y, set(1.0f).v), y)};
}
#else
static inline Vec silu(Vec x) { return x / (set(1.0f) + exp(zero() - x)); }
#endif

// Calls f(i, lanes) for every vector of n elements; lanes.load and lanes.store access only existing elements.
struct AllLanes {
  template <class T>
  Vec load(const T* p) const {
    return TR_RUNG::load(p);
  }
  template <class T>
  void store(T* p, Vec x) const {
    TR_RUNG::store(p, x);
  }
};
struct FirstLanes {
  int64_t n;

  template <class T>
  Vec load(const T* p) const {
    return TR_RUNG::load(p, n);
  }
  template <class T>
  void store(T* p, Vec x) const {
    TR_RUNG::store(p, x, n);
  }
};
template <class F>
static inline void for_lanes(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, AllLanes{});
  if (i < n) f(i, FirstLanes{n - i});
}

// x rounded to T.
template <class T>
static inline Vec round_to(Vec x);
template <>
inline Vec round_to<float>(Vec x) {
  return x;
}
template <>
inline Vec round_to<bf16>(Vec x) {
  return widen(narrow(x));
}

// 2 * kLanes elements of a row in unspecified order: for bf16 the even and the odd ones, where this halves the number
// of instructions. Rounding costs more than sums and products, and two vectors are rounded in the time of one.
struct Two {
  Vec a, b;
};
static inline Two operator+(Two x, Two y) { return {x.a + y.a, x.b + y.b}; }
static inline Two operator*(Two x, Two y) { return {x.a * y.a, x.b * y.b}; }
static inline Two operator*(Two x, Vec y) { return {x.a * y, x.b * y}; }

template <class T>
static inline Two round_to(Two x) {
  return {round_to<T>(x.a), round_to<T>(x.b)};
}
// Calls f(i, two) for every 2 * kLanes of n elements; two.load and two.store access only existing elements. two.store
// returns the rounded values.
struct AllTwo {
  template <class T>
  Two load(const T* p) const {
    return {TR_RUNG::load(p), TR_RUNG::load(p + kLanes)};
  }
  template <class T>
  Two store(T* p, Two x) const {
    TR_RUNG::store(p, x.a);
    TR_RUNG::store(p + kLanes, x.b);
    return round_to<T>(x);
  }
};
struct FirstTwo {
  int64_t n;  // below 2 * kLanes

  template <class T>
  Two load(const T* p) const {
    if (n <= kLanes) return {TR_RUNG::load(p, n), zero()};
    return {TR_RUNG::load(p), TR_RUNG::load(p + kLanes, n - kLanes)};
  }
  template <class T>
  Two store(T* p, Two x) const {
    TR_RUNG::store(p, x.a, std::min<int64_t>(n, kLanes));
    if (n > kLanes) TR_RUNG::store(p + kLanes, x.b, n - kLanes);
    return round_to<T>(x);
  }
};
#ifdef TR_AVX512
static inline Two widen_words(__m512i words) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(words, 16))}, {_mm512_castsi512_ps(_mm512_and_si512(words, upper))}};
}
// The upper halves of even and odd lanes, alternating.
static inline __m512i upper_words(__m512i even, __m512i odd) {
  return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(even, 16), odd);
}
static inline __m512i narrow_words(Two x) {
#ifdef TR_BF16
  alignas(64) static constexpr uint16_t kTurns[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kTurns), (__m512i)_mm512_cvtne2ps_pbh(x.b.v, x.a.v));
#else
  return upper_words(rounded_bits(x.a), rounded_bits(x.b));
#endif
}
template <>
inline Two round_to<bf16>(Two x) {
  return widen_words(narrow_words(x));
}
template <>
inline Two AllTwo::load<bf16>(const bf16* p) const {
  return widen_words(_mm512_loadu_si512(p));
}
template <>
inline Two AllTwo::store<bf16>(bf16* p, Two x) const {
  const __m512i words = narrow_words(x);
  _mm512_storeu_si512(p, words);
  return widen_words(words);
}
static inline __mmask32 first_words(int64_t n) { return static_cast<__mmask32>((uint64_t{1} << n) - 1); }
// n <= 32 numbers, then zeros.
static inline __m512i load_words(const bf16* p, int64_t n) { return _mm512_maskz_loadu_epi16(first_words(n), p); }
template <>
inline Two FirstTwo::load<bf16>(const bf16* p) const {
  return widen_words(load_words(p, n));
}
template <>
inline Two FirstTwo::store<bf16>(bf16* p, Two x) const {
  const __m512i words = narrow_words(x);
  _mm512_mask_storeu_epi16(p, first_words(n), words);
  return widen_words(words);
}
#endif
// kLanes pairs of bf16 as floats: the first of each pair, then the second.
static inline Two load_pairs(const bf16* p) {
#ifdef TR_AVX512
  return widen_words(_mm512_loadu_si512(p));
#else
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16))}, {_mm256_castsi256_ps(_mm256_and_si256(pairs, upper))}};
#endif
}
template <class F>
static inline void for_two(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) f(i, AllTwo{});
  if (i < n) f(i, FirstTwo{n - i});
}

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

}  // namespace tilerank::TR_RUNG
