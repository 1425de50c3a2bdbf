// What products of int8 with codes of other bits need beyond blocks-inl.h, for the rung that includes this file (no
// include guard; include after blocks-inl.h). The order of nibbles is that of the eight inputs of a word of 4-bit
// codes.

namespace tilerank::TR_RUNG {

#ifdef TR_AVX512
static inline Ints differ(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
// The entry of a table of 16 bytes for every index below 16.
static inline Ints lookup_nibbles(const int8_t* table, Ints indices) {
  const __m128i entries = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), indices);
}
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

// The place of byte i in the order of nibbles.
constexpr int64_t nibble_place(int64_t i) {
  constexpr int64_t kPlaces[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  return i / 8 * 8 + kPlaces[i % 8];
}
// The bytes of every eight in the order of nibbles.
static inline Ints in_nibble_order(Ints x) {
  alignas(16) static constexpr int8_t kOrder[16] = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};
  return shuffle_bytes(x, kOrder);
}

}  // namespace tilerank::TR_RUNG
