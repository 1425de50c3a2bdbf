// The weight formats of grouped.h for the rung that includes this file (no include guard). A format says where tiles
// are, expands them to bf16 in the layout of pack.h, and knows the scale, the negative of the zero and what is ahead.
// With AMX, expand asks for a line from `ahead`, if there is such, before each line that it reads: asked for four at
// once they came, measured, a twentieth later.

namespace tilerank::TR_RUNG {

#ifdef TR_AMX
// A line, after a request for another one, if any. Both stay where they are written: GCC asks for the lines of a tile
// all at once, else, and loads one three times, which took a sixth of the time that reading a weight takes.
static inline __m512i load_in_turn(const char* p, const char* ahead) {
  if (ahead) asm volatile("prefetcht0 %0" ::"m"(*ahead));
  __m512i line;
  asm volatile("vmovdqu64 %1, %0" : "=v"(line) : "m"(*reinterpret_cast<const char (*)[64]>(p)));
  return line;
}
#endif

struct GroupedWeight {
  const char* const values;
  const int64_t groups, group_tiles, tile_bytes;

  explicit GroupedWeight(const Tensor& values)
      : values(values.as<const char>()),
        groups(values.size[1]),
        group_tiles(values.size[2]),
        tile_bytes(values.size[4]) {}

  // The first half of a tile; the second follows.
  const char* tile(int64_t block, int64_t tile) const {
    return values + (block * groups * group_tiles + tile) * 2 * tile_bytes;
  }
};

struct Int4 : GroupedWeight {
  static constexpr int64_t kPackedTile = 256;
  static constexpr bool kMayHaveZeros = true;
  const f16* const scales;
  const int8_t* const zeros;

  // operands: values, scales, zeros or none
  explicit Int4(const Tensor* operands)
      : GroupedWeight(operands[0]), scales(operands[1].as<const f16>()), zeros(operands[2].as<const int8_t>()) {}

  // of outputs v * kLanes ... of a block
  Vec scale(int64_t block, int64_t group, int64_t v) const {
    const f16* const at = scales + (block * groups + group) * kBlockN + v * kLanes;
#ifdef TR_AVX512
    const Vec stored{_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)))};
#else
    const Vec stored{_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)))};
#endif
    return stored * set(kInt4ScaleUnit);
  }

  bool has_zeros() const { return zeros != nullptr; }
  Vec negative_zero(int64_t block, int64_t group, int64_t v) const {
    const int8_t* const at = zeros + (block * groups + group) * kBlockN + v * kLanes;
#ifdef TR_AVX512
    const Vec stored{_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))))};
#else
    const Vec stored{_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))))};
#endif
    return zero() - stored;
  }

  // What `scale` and `negative_zero` read.
  void fetch_scales(int64_t block, int64_t group) const {
    _mm_prefetch(reinterpret_cast<const char*>(scales + (block * groups + group) * kBlockN), _MM_HINT_T1);
    if (zeros) _mm_prefetch(reinterpret_cast<const char*>(zeros + (block * groups + group) * kBlockN), _MM_HINT_T1);
  }

  // Inline, since with few rows it stands between any two products.
  [[gnu::always_inline]] static inline void expand(const char* from, bf16* to,
                                                   [[maybe_unused]] const char* ahead = nullptr) {
#ifdef TR_AMX
    // The two bytes of the values apart, from tables of bytes: a look-up of words takes both of the ports that work on
    // such vectors, one of bytes takes one and serves twice as many codes. Only the low six bits of an index count:
    // four times the table, and what is above a nibble needs no masking.
    const __m512i low_bytes = _mm512_load_si512(kInt4Bytes.low), high_bytes = _mm512_load_si512(kInt4Bytes.high);
    const __m512i even = _mm512_set1_epi16(0x00ff);
    constexpr int kEvenElseOdd = 0xca;  // bits of the second where the first is set, else of the third
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line, to += 4 * 32) {
      const __m512i codes = load_in_turn(from + line * 64, ahead ? ahead + line * 64 : nullptr);
      for (int nibble = 0; nibble < 2; ++nibble) {  // of every byte: 0 and 2 of a word, 1 and 3
        const __m512i index = nibble ? _mm512_srli_epi16(codes, 4) : codes;
        const __m512i low = _mm512_permutexvar_epi8(index, low_bytes);
        const __m512i high = _mm512_permutexvar_epi8(index, high_bytes);
        const __m512i first = _mm512_ternarylogic_epi64(even, low, _mm512_slli_epi16(high, 8), kEvenElseOdd);
        const __m512i second = _mm512_ternarylogic_epi64(even, _mm512_srli_epi16(low, 8), high, kEvenElseOdd);
        _mm512_store_si512(to + nibble * 32, first);
        _mm512_store_si512(to + (nibble + 2) * 32, second);
      }
    }
#elif defined(TR_AVX512)
    // Only the low five bits of an index count: twice the table, and the nibble above needs no masking.
    const __m512i table = _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(kInt4Values)));
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line, to += 4 * 32) {
      const __m512i codes = _mm512_loadu_si512(from + line * 64);
      _mm512_store_si512(to, _mm512_permutexvar_epi16(codes, table));
      _mm512_store_si512(to + 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table));
      _mm512_store_si512(to + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table));
      _mm512_store_si512(to + 96, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table));
    }
#else
    const __m256i table = _mm256_load_si256(reinterpret_cast<const __m256i*>(kInt4Values));
    const __m256i split = _mm256_shuffle_epi8(
        table, _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)));
    // Low and high bytes of the 16 values, in both lanes.
    const __m256i low = _mm256_permute4x64_epi64(split, 0x88), high = _mm256_permute4x64_epi64(split, 0xdd);
    const __m256i nibbles = _mm256_set1_epi16(0x0f0f), even = _mm256_set1_epi16(0x00ff);
    for (int part = 0; part < 8; ++part) {
      const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + part * 32));
      bf16* const out = to + part / 2 * 4 * 32 + part % 2 * 16;
      for (int shift = 0; shift < 2; ++shift) {
        // Even bytes are nibble `shift` of their words, odd bytes nibble `shift` + 2.
        const __m256i index = _mm256_and_si256(shift ? _mm256_srli_epi16(codes, 4) : codes, nibbles);
        const __m256i l = _mm256_shuffle_epi8(low, index), h = _mm256_shuffle_epi8(high, index);
        const __m256i first = _mm256_or_si256(_mm256_and_si256(l, even), _mm256_slli_epi16(h, 8));
        const __m256i third = _mm256_or_si256(_mm256_srli_epi16(l, 8), _mm256_andnot_si256(even, h));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + shift * 32), first);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + (shift + 2) * 32), third);
      }
    }
#endif
  }
};

struct Fp8 : GroupedWeight {
  static constexpr int64_t kPackedTile = 512;
  static constexpr bool kMayHaveZeros = false;
  const float* const scales;

  // operands: values, scales
  explicit Fp8(const Tensor* operands) : GroupedWeight(operands[0]), scales(operands[1].as<const float>()) {}

  Vec scale(int64_t block, int64_t group, int64_t) const { return set(scales[block * groups + group]); }
  bool has_zeros() const { return false; }
  Vec negative_zero(int64_t, int64_t, int64_t) const { return zero(); }
  void fetch_scales(int64_t, int64_t) const {}  // few enough to come by themselves

#ifdef TR_AMX
  static inline void expand(const char* from, bf16* to, const char* ahead = nullptr) {
    // The bytes of the bf16 for every code without its sign: two tables of 128.
    const __m512i low0 = _mm512_load_si512(kFp8Bytes.low), low1 = _mm512_load_si512(kFp8Bytes.low + 64);
    const __m512i high0 = _mm512_load_si512(kFp8Bytes.high), high1 = _mm512_load_si512(kFp8Bytes.high + 64);
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

#else
  // The bf16 of eight f16, in the low halves.
  static inline __m256i widen_f16(__m128i eight) {
    const __m256 values = _mm256_mul_ps(_mm256_cvtph_ps(eight), _mm256_set1_ps(256.0f));
    return _mm256_srli_epi32(_mm256_castps_si256(values), 16);
  }

  static inline void expand(const char* from, bf16* to) {
    const __m256i magnitude = _mm256_set1_epi16(0x7f);
    for (int part = 0; part < 32; ++part) {
      const __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + part * 16)));
      // As f16 a code's bits mean 2^-8 of its value, subnormals too; only NaN needs care.
      const __m256i bits = _mm256_and_si256(codes, magnitude);
      const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(bits, magnitude), _mm256_set1_epi16(0x7e00));
      const __m256i sign = _mm256_slli_epi16(_mm256_andnot_si256(magnitude, codes), 8);
      const __m256i half = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(bits, 7), sign), nan);
      const __m256i first = widen_f16(_mm256_castsi256_si128(half)),
                    second = widen_f16(_mm256_extracti128_si256(half, 1));
      const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xd8);
      bf16* const out = to + part / 4 * 2 * 32 + part % 4 * 8;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(packed));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 32), _mm256_extracti128_si256(packed, 1));
    }
  }
#endif
};

}  // namespace tilerank::TR_RUNG
