// Transposes 16 x 16 words of 32 bits, for the rung that includes this file (no include guard).

namespace tilerank::TR_RUNG {

#ifdef TR_AVX512
// columns[i] = word i of all rows; the contents of rows are overwritten.
static inline void transpose(__m512i (&rows)[16], __m512i (&columns)[16]) {
  for (int i = 0; i < 16; i += 2) {
    columns[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    columns[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(columns[i], columns[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(columns[i], columns[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(columns[i + 1], columns[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(columns[i + 1], columns[i + 3]);
  }
  // Quarter q of rows[4 g + j] holds word 4 q + j of the original rows 4 g to 4 g + 3.
  for (int j = 0; j < 4; ++j) {
    const __m512i even0 = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0x88);
    const __m512i odd0 = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0xdd);
    const __m512i even1 = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0x88);
    const __m512i odd1 = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0xdd);
    columns[j] = _mm512_shuffle_i32x4(even0, even1, 0x88);
    columns[4 + j] = _mm512_shuffle_i32x4(odd0, odd1, 0x88);
    columns[8 + j] = _mm512_shuffle_i32x4(even0, even1, 0xdd);
    columns[12 + j] = _mm512_shuffle_i32x4(odd0, odd1, 0xdd);
  }
}
#endif

}  // namespace tilerank::TR_RUNG
