// What products with blocks of 32 outputs and sums of bf16 need beyond simd-inl.h, for the rung that includes this file
// (no include guard: a kernel file includes it before the headers that use it).
//
//   Vec32 x = load32(p)         32 floats in 32 / kLanes vectors; load32(p, step): vector v from p + v * step
//   store(p, x)                 rounds to nearest even if p is bf16*
//   stream(p, x)                the same, in whole cache lines that are not read first; end_streams() orders them
//   store_exactly(two, p, x)    two.store(p, x) that does not treat subnormal numbers as zero on any rung
//   Ints                        kLanes words of 32 bits, twice as many halves of 16 bits, or four times as many bytes

namespace tilerank::TR_RUNG {

using Vec32 = std::array<Vec, 32 / kLanes>;
static inline Vec32 load32(const float* p, int64_t step = kLanes) {
  Vec32 x;
  for (int v = 0; v < 32 / kLanes; ++v) x[v] = load(p + v * step);
  return x;
}
template <class T>
static inline void store(T* p, const Vec32& x) {
  for (int v = 0; v < 32 / kLanes; ++v) store(p + v * kLanes, x[v]);
}
#ifdef TR_AVX512
static inline void stream(float* p, const Vec32& x) {
  _mm512_stream_ps(p, x[0].v);
  _mm512_stream_ps(p + kLanes, x[1].v);
}
static inline void stream(bf16* p, const Vec32& x) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), narrow(x[0], x[1]));
}
// Copies n <= 32 numbers, then zeros, into a cache line.
static inline void copy_line(void* to, const bf16* from, int64_t n) { _mm512_store_si512(to, load_words(from, n)); }
#else
template <class T>
static inline void stream(T* p, const Vec32& x) {
  store(p, x);
}
#endif
static inline void end_streams() { _mm_sfence(); }

template <class Some, class T>
static inline void store_exactly(const Some& two, T* p, Two x) {
  two.store(p, x);
}
#ifdef TR_AVX512
static inline __m512i rounded_exactly(Vec x) {
  return _mm512_mask_mov_epi32(rounded_number(x), is_nan(x), _mm512_set1_epi32(0x7fc00000));
}
static inline __m512i rounded_words(Two x) { return upper_words(rounded_exactly(x.a), rounded_exactly(x.b)); }
static inline void store_exactly(const AllTwo&, bf16* p, Two x) { _mm512_storeu_si512(p, rounded_words(x)); }
static inline void store_exactly(const FirstTwo& two, bf16* p, Two x) {
  _mm512_mask_storeu_epi16(p, first_words(two.n), rounded_words(x));
}
#endif

#ifdef TR_AVX512
#define TR_VECTOR(operation) _mm512_##operation
using Ints = __m512i;
static inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
static inline Ints bits_of(Vec x) { return _mm512_castps_si512(x.v); }
static inline Vec vec_of(Ints bits) { return {_mm512_castsi512_ps(bits)}; }
// a | (b & c)
static inline Ints or_and(Ints a, Ints b, Ints c) { return _mm512_ternarylogic_epi64(a, b, c, 0xf8); }
// The 64-bit parts 0, 2, ... of x, then 1, 3, ...
static inline Ints even_parts_first(Ints x) {
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), x);
}
static inline Ints both(Ints a, Ints b) { return _mm512_and_si512(a, b); }
// The larger of unsigned halves.
static inline Ints max_halves(Ints a, Ints b) { return _mm512_max_epu16(a, b); }
static inline uint32_t largest_word(Ints x) { return _mm512_reduce_max_epu32(x); }
// The lower halves of even and odd words, alternating.
static inline Ints lower_words(Ints even, Ints odd) {
  return _mm512_mask_blend_epi16(0xaaaaaaaau, even, _mm512_slli_epi32(odd, 16));
}
// The halves of both as signed bytes, in order.
static inline Ints bytes_of_halves(Ints low, Ints high) { return even_parts_first(_mm512_packs_epi16(low, high)); }
// Writes the lowest byte of every word.
static inline void store_low_bytes(int8_t* p, Ints x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
// sum += the products of unsigned bytes of x and signed bytes of y, four in each word; it may wrap around.
static inline Ints add_dot(Ints sum, Ints x, Ints y) { return _mm512_dpbusd_epi32(sum, x, y); }
static inline int32_t sum_of_words(Ints x) { return _mm512_reduce_add_epi32(x); }
// Writes the first n words.
static inline void store(void* p, Ints x, int64_t n) { _mm512_mask_storeu_epi32(p, first_lanes(n), x); }
static inline void store(void* p, Ints x) { _mm512_storeu_si512(p, x); }
static inline void stream(void* p, Ints x) { _mm512_stream_si512(static_cast<__m512i*>(p), x); }
static inline Ints abs_bytes(Ints x) { return _mm512_abs_epi8(x); }
// Bits of a where those of `which` are set, of b elsewhere.
static inline Ints choose(Ints which, Ints a, Ints b) { return _mm512_ternarylogic_epi64(which, a, b, 0xca); }
// The entry of a table for every index, of which only the lowest bits count.
static inline Vec lookup(Vec table, Ints indices) { return {_mm512_permutexvar_ps(indices, table.v)}; }
// The same of 16 halves; `table` is aligned.
static inline Ints lookup_halves(const uint16_t* table, Ints indices) {
  const __m256i entries = _mm256_load_si256(reinterpret_cast<const __m256i*>(table));
  return _mm512_permutexvar_epi16(indices, _mm512_broadcast_i64x4(entries));
}
// The lower (0) or upper (1) half of a vector: kLanes halves.
template <int kUpper>
static inline __m256i half_of(Ints x) {
  return _mm512_extracti64x4_epi64(x, kUpper);
}
static inline Vec load(const f16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
#else
#define TR_VECTOR(operation) _mm256_##operation
using Ints = __m256i;
static inline Ints load_ints(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
static inline Ints bits_of(Vec x) { return _mm256_castps_si256(x.v); }
static inline Vec vec_of(Ints bits) { return {_mm256_castsi256_ps(bits)}; }
static inline Ints or_and(Ints a, Ints b, Ints c) { return _mm256_or_si256(a, _mm256_and_si256(b, c)); }
static inline Ints both(Ints a, Ints b) { return _mm256_and_si256(a, b); }
static inline uint32_t largest_word(Ints x) {
  alignas(32) uint32_t words[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(words), x);
  return *std::max_element(words, words + 8);
}
static inline void store_low_bytes(int8_t* p, Ints x) {
  const __m256i first = _mm256_set1_epi32(0x0c080400);  // bytes 0, 4, 8 and 12 of each half
  const __m256i bytes = _mm256_shuffle_epi8(x, first);
  const __m128i joined = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), joined);
}
// The sums of the products of two halves in each word.
static inline Ints dot(Ints x, Ints y) { return _mm256_madd_epi16(x, y); }
static inline Ints even_parts_first(Ints x) { return _mm256_permute4x64_epi64(x, _MM_SHUFFLE(3, 1, 2, 0)); }
template <int kUpper>
static inline __m128i half_of(Ints x) {
  return _mm256_extracti128_si256(x, kUpper);
}
static inline Vec load(const f16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
// The entry of a table of 16 bytes for every index below 16.
static inline Ints lookup_nibbles(const int8_t* table, Ints indices) {
  const __m128i entries = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), indices);
}
#endif

static inline Ints words(int32_t x) { return TR_VECTOR(set1_epi32)(x); }
static inline Ints halves(int x) { return TR_VECTOR(set1_epi16)(static_cast<int16_t>(x)); }
static inline Ints bytes(int x) { return TR_VECTOR(set1_epi8)(static_cast<char>(x)); }
static inline Vec to_vec(Ints x) { return {TR_VECTOR(cvtepi32_ps)(x)}; }
static inline Ints add(Ints a, Ints b) { return TR_VECTOR(add_epi32)(a, b); }
static inline Ints subtract(Ints a, Ints b) { return TR_VECTOR(sub_epi32)(a, b); }
static inline Ints max_words(Ints a, Ints b) { return TR_VECTOR(max_epu32)(a, b); }  // unsigned
static inline Ints add_halves(Ints a, Ints b) { return TR_VECTOR(add_epi16)(a, b); }
// Shifts: left, right with copies of the sign, and down with zeros.
template <int kBits>
static inline Ints shift_left(Ints x) {
  return TR_VECTOR(slli_epi32)(x, kBits);
}
template <int kBits>
static inline Ints shift_right(Ints x) {
  return TR_VECTOR(srai_epi32)(x, kBits);
}
template <int kBits>
static inline Ints shift_down(Ints x) {
  return TR_VECTOR(srli_epi32)(x, kBits);
}
template <int kBits>
static inline Ints shift_halves_left(Ints x) {
  return TR_VECTOR(slli_epi16)(x, kBits);
}
template <int kBits>
static inline Ints shift_halves_right(Ints x) {
  return TR_VECTOR(srai_epi16)(x, kBits);
}
template <int kBits>
static inline Ints shift_halves_down(Ints x) {
  return TR_VECTOR(srli_epi16)(x, kBits);
}

// 2^(e - 127) for kLanes bytes e; infinity for 255.
static inline Vec powers_of_two(const uint8_t* p) {
#ifdef TR_AVX512
  const __m512i exponents = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  const __m256i exponents = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#endif
  return vec_of(max_words(shift_left<23>(exponents), words(0x400000)));  // 2^-127 is subnormal
}

// The numbers of kLanes fp8 codes (e4m3) without signs and NaN. As f16, the bits of a code mean 2^-8 of its value,
// subnormals included.
static inline Vec magnitudes_of_e4m3(const uint8_t* p) {
#ifdef TR_AVX512
  const __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return Vec{_mm512_cvtph_ps(_mm256_slli_epi16(codes, 7))} * set(256);
#else
  const __m128i codes = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return Vec{_mm256_cvtph_ps(_mm_slli_epi16(codes, 7))} * set(256);
#endif
}

// kLanes halves as floats: the bits of f16, or integers.
template <class Half>
static inline Vec floats_of_f16(Half x) {
  return {TR_VECTOR(cvtph_ps)(x)};
}
template <class Half>
static inline Vec floats_of_int16(Half x) {
  return to_vec(TR_VECTOR(cvtepi16_epi32)(x));
}
#undef TR_VECTOR

#ifdef TR_BF16
// The entry of a table of 64 bytes for every index, of which only the low six bits count.
static inline Ints lookup_bytes(Ints table, Ints indices) { return _mm512_permutexvar_epi8(indices, table); }

// A table of 128 bytes.
class ByteTable {
 public:
  explicit ByteTable(const uint8_t* table) : first_(load_ints(table)), second_(load_ints(table + 64)) {}
  // The entries of 64 indices, of which only the low seven bits count.
  Ints operator[](Ints indices) const { return _mm512_permutex2var_epi8(first_, indices, second_); }
  // The same, but 0 where the byte of `chosen` is 0.
  Ints where(Ints chosen, Ints indices) const {
    return _mm512_maskz_permutex2var_epi8(_mm512_test_epi8_mask(chosen, chosen), first_, indices, second_);
  }

 private:
  const Ints first_, second_;
};

// The low and the high bytes of 64 bf16 values; interleaved, they form pairs of inputs.
struct BytesOfBf16 {
  Ints low, high;

  Ints lower() const { return _mm512_unpacklo_epi8(low, high); }
  Ints upper() const { return _mm512_unpackhi_epi8(low, high); }
};

// sums + the products of the pairs of bf16 of a and b
static inline Vec add_dot(Vec sums, Ints a, Ints b) { return {_mm512_dpbf16_ps(sums.v, (__m512bh)a, (__m512bh)b)}; }
#endif

#ifdef TR_AMX
// Loads a line after prefetching another one, if any. Inline assembly fixes the order: GCC would otherwise move the
// prefetches of a tile together and load one line three times.
static inline Ints load_in_turn(const char* p, const char* ahead) {
  if (ahead) asm volatile("prefetcht0 %0" ::"m"(*ahead));
  Ints line;
  asm volatile("vmovdqu64 %1, %0" : "=v"(line) : "m"(*reinterpret_cast<const char (*)[64]>(p)));
  return line;
}
#endif

}  // namespace tilerank::TR_RUNG
