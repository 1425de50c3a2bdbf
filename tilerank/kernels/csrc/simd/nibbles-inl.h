// What products of 4-bit codes with int8 need beyond blocks-inl.h, for the rung that includes this file (no include
// guard; include after blocks-inl.h).

namespace tilerank::TR_RUNG {

#ifdef TR_AVX512
// (a & b) ^ c
static inline Ints differ_both(Ints a, Ints b, Ints c) { return _mm512_ternarylogic_epi64(a, b, c, 0x6a); }
// The bytes of every 16 in the order of 16 aligned places.
static inline Ints shuffle_bytes(Ints x, const int8_t* places) {
  return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(places))));
}
#else
static inline Ints differ(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
static inline Ints shuffle_bytes(Ints x, const int8_t* places) {
  const __m128i order = _mm_load_si128(reinterpret_cast<const __m128i*>(places));
  return _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(order));
}
// The sums of the products of two unsigned bytes of x with signed bytes of y in each half, which must fit.
static inline Ints dot_bytes(Ints x, Ints y) { return _mm256_maddubs_epi16(x, y); }
static inline void store(void* p, Ints x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
#endif

}  // namespace tilerank::TR_RUNG
