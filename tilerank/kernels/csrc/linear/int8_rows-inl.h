// Symmetric int8 quantisation of rows, compiled once per rung (no include guard): the largest magnitude of a row
// becomes code 127. Activations, which are quantised at run time, and weights, at load time, share this code.

namespace tilerank::TR_RUNG {

// x ~ code * scale with code = round(x * inverse), ties to even, rounded once.
struct Quantiser {
  float scale, inverse;

  // largest_bits: the bits of the row's largest magnitude. Without the sign, floats order like their bits as integers,
  // with infinity and NaN last. A row below 2^-100 becomes zeros, because the inverse must be finite. A row with an
  // infinity or NaN gets the scale NaN and so becomes NaN as a whole.
  explicit Quantiser(uint32_t largest_bits) {
    float largest;
    std::memcpy(&largest, &largest_bits, 4);
    largest = std::max(largest, 0x1p-100f);
    const bool finite = largest_bits < 0x7f800000u;
    scale = finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
    inverse = finite ? 127.0f / largest : 0.0f;
  }
  bool finite() const { return inverse != 0.0f; }
};

// Returns x * inverse + 1.5 * 2^23. Its unit in the last place is 1, so its lowest bits are the rounded integer in
// two's complement.
static inline Vec add_magic(Vec x, Vec inverse) { return fma(x, inverse, set(0x1.8p23f)); }

#ifdef TR_AVX512

static inline uint32_t largest_bits(const bf16* x, int64_t k) {
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i a = _mm512_setzero_si512(), b = a;
  int64_t i = 0;
  for (; i + 64 <= k; i += 64) {
    a = _mm512_max_epu16(a, _mm512_and_si512(magnitude, load_ints(x + i)));
    b = _mm512_max_epu16(b, _mm512_and_si512(magnitude, load_ints(x + i + 32)));
  }
  for (; i < k; i += 32) {
    const auto mask = static_cast<__mmask32>((uint64_t{1} << std::min<int64_t>(32, k - i)) - 1);
    a = _mm512_max_epu16(a, _mm512_and_si512(magnitude, _mm512_maskz_loadu_epi16(mask, x + i)));
  }
  a = _mm512_max_epu16(a, b);
  const __m512i even = _mm512_slli_epi32(a, 16), odd = _mm512_andnot_si512(_mm512_set1_epi32(0xffff), a);
  return _mm512_reduce_max_epu32(_mm512_max_epu32(even, odd));
}

static inline uint32_t largest_bits(const float* x, int64_t k) {
  __m512i largest = _mm512_setzero_si512();
  for (int64_t i = 0; i < k; i += 16) {
    const Vec v = load(x + i, std::min<int64_t>(16, k - i));
    largest = _mm512_max_epu32(largest, _mm512_and_si512(bits_of(v), _mm512_set1_epi32(0x7fffffff)));
  }
  return _mm512_reduce_max_epu32(largest);
}

// Returns the codes of 32 bf16 values, in 16 bits each.
static inline __m512i codes_of_32(__m512i halves, Vec inverse) {
  const Vec even{_mm512_castsi512_ps(_mm512_slli_epi32(halves, 16))};
  const Vec odd{_mm512_castsi512_ps(_mm512_andnot_si512(_mm512_set1_epi32(0xffff), halves))};
  return _mm512_mask_blend_epi16(0xaaaaaaaau, bits_of(add_magic(even, inverse)),
                                 _mm512_slli_epi32(bits_of(add_magic(odd, inverse)), 16));
}

// Stores the codes of x[0..n), n <= 64, then zeros up to 64.
static inline void store_codes(int8_t* to, const bf16* x, int64_t n, Vec inverse) {
  __m512i low, high;
  if (n == 64) {
    low = load_ints(x), high = load_ints(x + 32);
  } else {
    const uint64_t mask = (uint64_t{1} << n) - 1;
    low = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask), x);
    high = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask >> 32), x + 32);
  }
  const __m512i codes = _mm512_packs_epi16(codes_of_32(low, inverse), codes_of_32(high, inverse));
  _mm512_storeu_si512(to, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), codes));
}

static inline void store_codes(int8_t* to, const float* x, int64_t n, Vec inverse) {
  for (int64_t i = 0; i < 64; i += 16) {
    const Vec v = i + 16 <= n ? load(x + i) : i < n ? load(x + i, n - i) : zero();
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(bits_of(add_magic(v, inverse))));
  }
}

#else

static inline uint32_t largest_of(__m256i bits) {
  alignas(32) uint32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), bits);
  return *std::max_element(lanes, lanes + 8);
}

template <class T>
static inline uint32_t largest_bits(const T* x, int64_t k) {
  __m256i largest = _mm256_setzero_si256();
  for (int64_t i = 0; i < k; i += 8) {
    const Vec v = i + 8 <= k ? load(x + i) : load(x + i, k - i);
    largest = _mm256_max_epu32(largest, _mm256_and_si256(bits_of(v), _mm256_set1_epi32(0x7fffffff)));
  }
  return largest_of(largest);
}

template <class T>
static inline void store_codes(int8_t* to, const T* x, int64_t n, Vec inverse) {
  const Ints magic = bits_of(set(0x1.8p23f));
  for (int64_t i = 0; i < 64; i += 8) {
    const Vec v = i + 8 <= n ? load(x + i) : i < n ? load(x + i, n - i) : zero();
    const Ints codes = _mm256_sub_epi32(bits_of(add_magic(v, inverse)), magic);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to + i), _mm_packs_epi16(words, words));
  }
}

#endif

// Quantises x[0..k), padded with zeros to a multiple of 64. to(t) returns where codes 64 t to 64 t + 63 go. Returns the
// scale.
template <class T, class To>
static inline float quantise_row(const T* x, int64_t k, const To& to) {
  const Quantiser quantiser(largest_bits(x, k));
  const Vec inverse = set(quantiser.inverse);
  for (int64_t i = 0; i < k; i += 64) {
    int8_t* const codes = to(i / 64);
    if (quantiser.finite()) {
      store_codes(codes, x + i, std::min<int64_t>(64, k - i), inverse);
    } else {
      std::memset(codes, 0, 64);
    }
  }
  return quantiser.scale;
}

// Returns sums * row_scale * scales, multiplied in the same order on every rung, so that all rungs give equal bits.
static inline Vec scaled(Ints sums, float row_scale, const float* scales) {
  return to_vec(sums) * (set(row_scale) * load(scales));
}

}  // namespace tilerank::TR_RUNG
