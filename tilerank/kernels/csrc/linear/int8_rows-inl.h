// Symmetric int8 quantisation of rows, compiled once per rung (no include guard): the largest magnitude of a row
// becomes code 127. Activations, which are quantised at run time, and weights, at load time, share this code.

namespace tilerank::TR_RUNG {

// x ~ code * scale with code = round(x * inverse), ties to even, rounded once.
struct Quantiser {
  float scale = 0.0f, inverse = 0.0f;

  Quantiser() = default;
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

// Returns the bits of the largest magnitude, for Quantiser.
template <class T>
static inline uint32_t largest_bits(const T* x, int64_t k) {
  Ints largest{};
  for_lanes(k, [&](int64_t i, auto lanes) {
    largest = max_words(largest, both(bits_of(lanes.load(x + i)), words(0x7fffffff)));
  });
  return largest_word(largest);
}

// Stores the codes of x[0..n), n <= 64, then zeros up to 64.
template <class T>
static inline void store_codes(int8_t* to, const T* x, int64_t n, Vec inverse) {
  for (int64_t i = 0; i < 64; i += kLanes) {
    const Vec v = i + kLanes <= n ? load(x + i) : i < n ? load(x + i, n - i) : zero();
    store_low_bytes(to + i, bits_of(add_magic(v, inverse)));
  }
}

#ifdef TR_AVX512
// The same two for bf16, without widening every vector.
static inline uint32_t largest_bits(const bf16* x, int64_t k) {
  const Ints magnitude = halves(0x7fff);
  Ints a{}, b{};
  int64_t i = 0;
  for (; i + 64 <= k; i += 64) {
    a = max_halves(a, both(magnitude, load_ints(x + i)));
    b = max_halves(b, both(magnitude, load_ints(x + i + 32)));
  }
  for (; i < k; i += 32) a = max_halves(a, both(magnitude, load_words(x + i, std::min<int64_t>(32, k - i))));
  const Two largest = widen_words(max_halves(a, b));
  return largest_word(max_words(bits_of(largest.a), bits_of(largest.b)));
}

// Returns the codes of 32 values, in 16 bits each.
static inline Ints codes_of(Ints values, Vec inverse) {
  const Two x = widen_words(values);
  return lower_words(bits_of(add_magic(x.a, inverse)), bits_of(add_magic(x.b, inverse)));
}

static inline void store_codes(int8_t* to, const bf16* x, int64_t n, Vec inverse) {
  const Ints low = n == 64 ? load_ints(x) : load_words(x, std::min<int64_t>(n, 32));
  const Ints high = n == 64 ? load_ints(x + 32) : load_words(x + 32, std::max<int64_t>(n - 32, 0));
  store(to, bytes_of_halves(codes_of(low, inverse), codes_of(high, inverse)));
}
#endif

// The same for a row that may not be finite: its codes are zeros.
template <class T>
static inline void store_codes(int8_t* to, const T* x, int64_t n, const Quantiser& by) {
  if (by.finite()) {
    store_codes(to, x, n, set(by.inverse));
  } else {
    std::memset(to, 0, 64);
  }
}

// Quantises x[0..n), n <= 64, in steps of kInputs. Stores 64 codes, zeros after the last, and the scale of each step.
template <int64_t kInputs, class T>
static inline void quantise_steps(const T* x, int64_t n, int8_t* codes, float* scales) {
  alignas(64) int8_t some[64];
  for (int64_t i = 0; i < 64; i += kInputs) {
    const int64_t inputs = std::clamp<int64_t>(n - i, 0, kInputs);
    const Quantiser quantiser(largest_bits(x + i, inputs));
    store_codes(some, x + i, inputs, quantiser);
    std::memcpy(codes + i, some, kInputs);
    scales[i / kInputs] = quantiser.scale;
  }
}

#ifdef TR_AVX512
// The largest of the lower (0) or the upper (1) half of the words.
static inline uint32_t largest_word(Ints x, int upper) {
  return _mm512_mask_reduce_max_epu32(upper ? 0xff00 : 0x00ff, x);
}
// `lower` in the lower half of the lanes, `upper` in the others.
static inline Vec halves_of(float lower, float upper) {
  return {_mm512_mask_blend_ps(0xff00, _mm512_set1_ps(lower), _mm512_set1_ps(upper))};
}

// The same for bf16: halves of 32 values at once. Codes of steps that are not finite are zeros, because the bits of NaN
// that come from a bf16 are zeros below the upper half.
template <int64_t kInputs>
static inline void quantise_steps(const bf16* x, int64_t n, int8_t* codes, float* scales) {
  const Ints parts[2] = {n == 64 ? load_ints(x) : load_words(x, std::min<int64_t>(n, 32)),
                         n == 64 ? load_ints(x + 32) : load_words(x + 32, std::max<int64_t>(n - 32, 0))};
  Ints quantised[2];
  Ints largest[2];
  for (int i = 0; i < 2; ++i) {
    const Two magnitudes = widen_words(both(halves(0x7fff), parts[i]));
    largest[i] = max_words(bits_of(magnitudes.a), bits_of(magnitudes.b));
  }
  if constexpr (kInputs == 64) largest[0] = largest[1] = max_words(largest[0], largest[1]);
  for (int i = 0; i < 2; ++i) {
    Vec inverse;
    if constexpr (kInputs >= 32) {
      const Quantiser quantiser(largest_word(largest[i]));
      scales[i * 32 / kInputs] = quantiser.scale;
      inverse = set(quantiser.inverse);
    } else {
      const Quantiser low(largest_word(largest[i], 0)), high(largest_word(largest[i], 1));
      scales[2 * i] = low.scale, scales[2 * i + 1] = high.scale;
      inverse = halves_of(low.inverse, high.inverse);
    }
    quantised[i] = codes_of(parts[i], inverse);
  }
  store(codes, bytes_of_halves(quantised[0], quantised[1]));
}
#endif

// Quantises x[0..k), padded with zeros to a multiple of 64. to(t) returns where codes 64 t to 64 t + 63 go. Returns the
// scale.
template <class T, class To>
static inline float quantise_row(const T* x, int64_t k, const To& to) {
  const Quantiser quantiser(largest_bits(x, k));
  for (int64_t i = 0; i < k; i += 64) store_codes(to(i / 64), x + i, std::min<int64_t>(64, k - i), quantiser);
  return quantiser.scale;
}

#ifdef TR_AVX512
// Returns the products of 64 codes with -zero.
static inline int32_t start_of(const int8_t* codes, int zero) {
  return -sum_of_words(add_dot(Ints{}, bytes(zero), load_ints(codes)));
}
#endif

// Returns sums * row_scale * scales, multiplied in the same order on every rung, so that all rungs give equal bits.
static inline Vec scaled(Ints sums, float row_scale, const float* scales) {
  return to_vec(sums) * (set(row_scale) * load(scales));
}

}  // namespace tilerank::TR_RUNG
