// The block-scaled formats (block_scaled.h), compiled once per rung (no include guard). A format locates tiles, expands
// their values into registers and returns scales and negated zero points.
//
// With AMX, expand() writes a tile as bf16 in the layout of pack.h. If `ahead` is given, it prefetches one line of it
// before each line that it reads.
//
// In vectors, a Line is 64 bytes of values for kLanes outputs. pair<P>() returns its inputs 2 P and 2 P + 1, scaled by
// 2^-kExponent. kWaitsForMemory: with few rows, multiplying a line is faster than reading it. kMostRows: the most rows
// of a panel, whose sums fill the registers that expanding leaves free. kFewRows: up to this number of rows,
// BlockScaledRows reads a whole block of the weight per panel.

namespace tilerank::TR_RUNG {

#ifdef TR_AMX
// Loads a line after prefetching another one, if any. Inline assembly fixes the order: GCC would otherwise move the
// prefetches of a tile together and load one line three times.
static inline __m512i load_in_turn(const char* p, const char* ahead) {
  if (ahead) asm volatile("prefetcht0 %0" ::"m"(*ahead));
  __m512i line;
  asm volatile("vmovdqu64 %1, %0" : "=v"(line) : "m"(*reinterpret_cast<const char (*)[64]>(p)));
  return line;
}
#endif

struct BlockScaledWeight {
  const char* const values;
  const int64_t k_blocks, k_block_tiles, tile_bytes;

  explicit BlockScaledWeight(const Tensor& values)
      : values(values.as<const char>()),
        k_blocks(values.size[1]),
        k_block_tiles(values.size[2]),
        tile_bytes(values.size[4]) {}

  // Returns the first half of a tile; the second half follows it.
  const char* tile(int64_t block, int64_t tile) const {
    return values + (block * k_blocks * k_block_tiles + tile) * 2 * tile_bytes;
  }
};

struct Int4 : BlockScaledWeight {
  static constexpr int64_t kPackedTile = 256;
  static constexpr bool kMayHaveZeros = true;
  static constexpr int kExponent = 0;
  static constexpr bool kWaitsForMemory = false;
  static constexpr int kMostRows = kLanes == 16 ? 14 : 3;
  static constexpr int64_t kFewRows = kLanes == 16 ? 2 * kMostRows : kMostRows;
  const f16* const scales;
  const int8_t* const zeros;

  // operands: values, scales, zeros or none
  explicit Int4(const Tensor* operands)
      : BlockScaledWeight(operands[0]), scales(operands[1].as<const f16>()), zeros(operands[2].as<const int8_t>()) {}

  // The scales of outputs v * kLanes to v * kLanes + kLanes - 1 of a block.
  Vec scale(int64_t block, int64_t k_block, int64_t v) const {
    const f16* const at = scales + (block * k_blocks + k_block) * kBlockN + v * kLanes;
#ifdef TR_AVX512
    const Vec stored{_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)))};
#else
    const Vec stored{_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)))};
#endif
    return stored * set(kInt4ScaleUnit);
  }

  bool has_zeros() const { return zeros != nullptr; }
  Vec negative_zero(int64_t block, int64_t k_block, int64_t v) const {
    const int8_t* const at = zeros + (block * k_blocks + k_block) * kBlockN + v * kLanes;
#ifdef TR_AVX512
    const Vec stored{_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))))};
#else
    const Vec stored{_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))))};
#endif
    return zero() - stored;
  }

  // Prefetches what scale() and negative_zero() read.
  void fetch_scales(int64_t block, int64_t k_block) const {
    _mm_prefetch(reinterpret_cast<const char*>(scales + (block * k_blocks + k_block) * kBlockN), _MM_HINT_T1);
    if (zeros) _mm_prefetch(reinterpret_cast<const char*>(zeros + (block * k_blocks + k_block) * kBlockN), _MM_HINT_T1);
  }

#ifdef TR_AMX
  // Inlined, because with few rows it runs between any two products.
  [[gnu::always_inline]] static inline void expand(const char* from, bf16* to, const char* ahead = nullptr) {
    // The low and the high byte of each value come from separate byte tables. A lookup of bytes (vpermb) occupies one
    // vector port and serves twice as many codes as a lookup of words, which occupies two. Only the low six bits of an
    // index count, so the table is repeated four times and the bits above a nibble need no mask.
    const __m512i low_bytes = _mm512_load_si512(kInt4Bytes.low), high_bytes = _mm512_load_si512(kInt4Bytes.high);
    const __m512i even = _mm512_set1_epi16(0x00ff);
    constexpr int kEvenElseOdd = 0xca;  // bits of the second operand where the first is set, of the third elsewhere
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line, to += 4 * 32) {
      const __m512i codes = load_in_turn(from + line * 64, ahead ? ahead + line * 64 : nullptr);
      for (int nibble = 0; nibble < 2; ++nibble) {  // of every byte: nibbles 0 and 2 of a word, then 1 and 3
        const __m512i index = nibble ? _mm512_srli_epi16(codes, 4) : codes;
        const __m512i low = _mm512_permutexvar_epi8(index, low_bytes);
        const __m512i high = _mm512_permutexvar_epi8(index, high_bytes);
        const __m512i first = _mm512_ternarylogic_epi64(even, low, _mm512_slli_epi16(high, 8), kEvenElseOdd);
        const __m512i second = _mm512_ternarylogic_epi64(even, _mm512_srli_epi16(low, 8), high, kEvenElseOdd);
        _mm512_store_si512(to + nibble * 32, first);
        _mm512_store_si512(to + (nibble + 2) * 32, second);
      }
    }
  }
#else
  // The 32 bits of a lane are the codes of eight inputs of its output: the even ones, then the odd ones.
  struct Line {
    static constexpr int kInputs = 8;

#ifdef TR_AVX512
    __m512i codes;

    explicit Line(const char* at) : codes(_mm512_loadu_si512(at)) {}

    template <int P>
    Pair pair() const {
#ifdef TR_BF16
      // Only the low five bits of an index count, so the table is repeated and the bits above a nibble need no mask.
      const __m512i table = _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(kInt4Values)));
      return {_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * P), table)};
#else
      return {value(_mm512_srli_epi32(codes, 4 * P)), value(_mm512_srli_epi32(codes, 16 + 4 * P))};
#endif
    }

   private:
    // Only the low four bits of an index count.
    static Vec value(__m512i index) {
      return {_mm512_permutexvar_ps(index, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1))};
    }
#else
    __m256i codes;

    explicit Line(const char* at) : codes(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))) {}

    template <int P>
    Pair pair() const {
      return {value(_mm256_slli_epi32(codes, 28 - 4 * P)), value(_mm256_slli_epi32(codes, 12 - 4 * P))};
    }

   private:
    static Vec value(__m256i topmost) { return {_mm256_cvtepi32_ps(_mm256_srai_epi32(topmost, 28))}; }
#endif
  };
#endif
};

// A byte for each code, and one scale for the 32 outputs of a block and a K-block.
struct ByteCodes : BlockScaledWeight {
  static constexpr int64_t kPackedTile = 512;
  static constexpr bool kMayHaveZeros = false;
#ifdef TR_BF16
  static constexpr bool kWaitsForMemory = true;
  static constexpr int kMostRows = 13;
  static constexpr int64_t kFewRows = 2 * kMostRows;
#else
  static constexpr bool kWaitsForMemory = false;
  static constexpr int kMostRows = kLanes == 16 ? 14 : 3;
  static constexpr int64_t kFewRows = kLanes == 16 ? 8 : 3;
#endif
  const float* const scales;

  // operands: values, scales
  explicit ByteCodes(const Tensor* operands) : BlockScaledWeight(operands[0]), scales(operands[1].as<const float>()) {}

  Vec scale(int64_t block, int64_t k_block, int64_t) const { return set(scales[block * k_blocks + k_block]); }
  bool has_zeros() const { return false; }
  Vec negative_zero(int64_t, int64_t, int64_t) const { return zero(); }
  void fetch_scales(int64_t, int64_t) const {}  // few enough to stay in the cache
};

struct Fp8 : ByteCodes {
  using ByteCodes::ByteCodes;
#ifdef TR_BF16
  static constexpr int kExponent = 0;
#else
  static constexpr int kExponent = 8;
#endif

#ifdef TR_AMX
  [[gnu::always_inline]] static inline void expand(const char* from, bf16* to, const char* ahead = nullptr) {
    // The low and the high byte of the bf16 value of every code without its sign, in two tables of 128.
    const __m512i low0 = _mm512_load_si512(kFp8Values.low), low1 = _mm512_load_si512(kFp8Values.low + 64);
    const __m512i high0 = _mm512_load_si512(kFp8Values.high), high1 = _mm512_load_si512(kFp8Values.high + 64);
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
#pragma GCC unroll 8
    for (int line = 0; line < 8; ++line, to += 2 * 32) {
      const __m512i codes = load_in_turn(from + line * 64, ahead ? ahead + line * 64 : nullptr);
      const __m512i low = _mm512_permutex2var_epi8(low0, codes, low1);
      const __m512i high = _mm512_permutex2var_epi8(high0, codes, high1);
      const __m512i with_sign = _mm512_ternarylogic_epi64(high, codes, sign, 0xf8);  // high | (codes & sign)
      _mm512_store_si512(to, _mm512_unpacklo_epi8(low, with_sign));
      _mm512_store_si512(to + 32, _mm512_unpackhi_epi8(low, with_sign));
    }
  }

#elif defined(TR_BF16)
  struct Line {
    static constexpr int kInputs = 4;
    // The low and the high bytes of the values of 64 codes; interleaved, they form pairs of inputs.
    __m512i low, high;

    explicit Line(const char* at) {
      const __m512i codes = _mm512_loadu_si512(at), sign = _mm512_set1_epi8(static_cast<char>(0x80));
      constexpr int kOrAnd = 0xf8;  // first | (second & third)
      low = _mm512_permutex2var_epi8(half(kFp8Values.low), codes, half(kFp8Values.low + 64));
      high = _mm512_permutex2var_epi8(half(kFp8Values.high), codes, half(kFp8Values.high + 64));
      high = _mm512_ternarylogic_epi64(high, codes, sign, kOrAnd);
    }

    template <int P>
    Pair pair() const {
      return {P == 0 ? _mm512_unpacklo_epi8(low, high) : _mm512_unpackhi_epi8(low, high)};
    }

   private:
    static __m512i half(const uint8_t* table) { return _mm512_load_si512(table); }
  };
#else
  // As f16, the bits of a code mean 2^-8 of its value, subnormals included.
  struct Line {
    static constexpr int kInputs = 4;

#ifdef TR_AVX512
    __m512i even, odd;  // f16: inputs 0 of all outputs, then inputs 2; inputs 1, then 3

    explicit Line(const char* at) {
      const __m512i codes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), _mm512_loadu_si512(at));
      even = half(_mm512_slli_epi16(codes, 8));
      odd = half(codes);
    }

    template <int P>
    Pair pair() const {
      const Two values{{_mm512_cvtph_ps(_mm512_extracti64x4_epi64(even, P))},
                       { _mm512_cvtph_ps(_mm512_extracti64x4_epi64(odd, P)) }};
      return values;
    }

   private:
    // Returns the f16 of the code in the upper byte of each word. Only the code of NaN carries into the topmost
    // exponent bit, which makes it an f16 NaN.
    static __m512i half(__m512i code) {
      const __m512i bits =
          _mm512_and_si512(_mm512_srai_epi16(code, 1), _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
      const __m512i carried = _mm512_add_epi16(bits, _mm512_set1_epi16(0x80));
      return _mm512_ternarylogic_epi64(bits, carried, _mm512_set1_epi16(0x4000), 0xf8);  // bits | (carried & 0x4000)
    }
#else
    __m256i even, odd;

    explicit Line(const char* at) {
      const __m256i codes =
          _mm256_permute4x64_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)), _MM_SHUFFLE(3, 1, 2, 0));
      even = half(_mm256_slli_epi16(codes, 8));
      odd = half(codes);
    }

    template <int P>
    Pair pair() const {
      return {{_mm256_cvtph_ps(_mm256_extracti128_si256(even, P))},
              {_mm256_cvtph_ps(_mm256_extracti128_si256(odd, P))}};
    }

   private:
    static __m256i half(__m256i code) {
      const __m256i bits =
          _mm256_and_si256(_mm256_srai_epi16(code, 1), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
      const __m256i carried = _mm256_add_epi16(bits, _mm256_set1_epi16(0x80));
      return _mm256_or_si256(bits, _mm256_and_si256(carried, _mm256_set1_epi16(0x4000)));
    }
#endif
  };
#endif
};

// Codes from -128 to 127, which are exact in bf16.
struct BlockInt8 : ByteCodes {
  using ByteCodes::ByteCodes;
  static constexpr int kExponent = 0;

#ifdef TR_AMX
  [[gnu::always_inline]] static inline void expand(const char* from, bf16* to, const char* ahead = nullptr) {
    const __m512i low0 = _mm512_load_si512(kInt8Values.low), low1 = _mm512_load_si512(kInt8Values.low + 64);
    const __m512i high0 = _mm512_load_si512(kInt8Values.high), high1 = _mm512_load_si512(kInt8Values.high + 64);
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
#pragma GCC unroll 8
    for (int line = 0; line < 8; ++line, to += 2 * 32) {
      const __m512i codes = load_in_turn(from + line * 64, ahead ? ahead + line * 64 : nullptr);
      const __m512i index = _mm512_abs_epi8(codes);  // only the low seven bits count, so that of -128 is 0
      const __mmask64 not_zero = _mm512_test_epi8_mask(codes, codes);
      const __m512i low = _mm512_permutex2var_epi8(low0, index, low1);
      const __m512i high = _mm512_maskz_permutex2var_epi8(not_zero, high0, index, high1);
      const __m512i with_sign = _mm512_ternarylogic_epi64(high, codes, sign, 0xf8);  // high | (codes & sign)
      _mm512_store_si512(to, _mm512_unpacklo_epi8(low, with_sign));
      _mm512_store_si512(to + 32, _mm512_unpackhi_epi8(low, with_sign));
    }
  }

#elif defined(TR_BF16)
  struct Line {
    static constexpr int kInputs = 4;
    // The low and the high bytes of the values of 64 codes; interleaved, they form pairs of inputs.
    __m512i low, high;

    explicit Line(const char* at) {
      const __m512i codes = _mm512_loadu_si512(at), sign = _mm512_set1_epi8(static_cast<char>(0x80));
      constexpr int kOrAnd = 0xf8;                   // first | (second & third)
      const __m512i index = _mm512_abs_epi8(codes);  // only the low seven bits count, so that of -128 is 0
      const __mmask64 not_zero = _mm512_test_epi8_mask(codes, codes);
      low = _mm512_permutex2var_epi8(half(kInt8Values.low), index, half(kInt8Values.low + 64));
      high = _mm512_maskz_permutex2var_epi8(not_zero, half(kInt8Values.high), index, half(kInt8Values.high + 64));
      high = _mm512_ternarylogic_epi64(high, codes, sign, kOrAnd);
    }

    template <int P>
    Pair pair() const {
      return {P == 0 ? _mm512_unpacklo_epi8(low, high) : _mm512_unpackhi_epi8(low, high)};
    }

   private:
    static __m512i half(const uint8_t* table) { return _mm512_load_si512(table); }
  };
#else
  struct Line {
    static constexpr int kInputs = 4;

#ifdef TR_AVX512
    __m512i even, odd;  // words: inputs 0 of all outputs, then inputs 2; inputs 1, then 3

    explicit Line(const char* at) {
      const __m512i codes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), _mm512_loadu_si512(at));
      even = _mm512_srai_epi16(_mm512_slli_epi16(codes, 8), 8);
      odd = _mm512_srai_epi16(codes, 8);
    }

    template <int P>
    Pair pair() const {
      return {value(_mm512_extracti64x4_epi64(even, P)), value(_mm512_extracti64x4_epi64(odd, P))};
    }

   private:
    static Vec value(__m256i words) { return {_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(words))}; }
#else
    __m256i even, odd;

    explicit Line(const char* at) {
      const __m256i codes =
          _mm256_permute4x64_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)), _MM_SHUFFLE(3, 1, 2, 0));
      even = _mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 8);
      odd = _mm256_srai_epi16(codes, 8);
    }

    template <int P>
    Pair pair() const {
      return {value(_mm256_extracti128_si256(even, P)), value(_mm256_extracti128_si256(odd, P))};
    }

   private:
    static Vec value(__m128i words) { return {_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(words))}; }
#endif
  };
#endif
};

}  // namespace tilerank::TR_RUNG
