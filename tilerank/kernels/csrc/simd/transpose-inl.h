// Transposes 16 x 16 words of 32 bits, or kLanes vectors, for the rung that includes this file (no include guard).

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
static inline void transpose(Vec (&rows)[16], Vec (&columns)[16]) {
  __m512i from[16], to[16];
  for (int i = 0; i < 16; ++i) from[i] = _mm512_castps_si512(rows[i].v);
  transpose(from, to);
  for (int i = 0; i < 16; ++i) columns[i].v = _mm512_castsi512_ps(to[i]);
}
#else
static inline void transpose(Vec (&rows)[8], Vec (&columns)[8]) {
  __m256 pairs[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i].v, rows[i + 1].v);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i].v, rows[i + 1].v);
  }
  // Half h of rows[4 g + j] holds column 4 h + j of rows 4 g to 4 g + 3.
  for (int i = 0; i < 8; i += 4) {
    rows[i].v = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    rows[i + 1].v = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    rows[i + 2].v = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    rows[i + 3].v = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  for (int j = 0; j < 4; ++j) {
    columns[j].v = _mm256_permute2f128_ps(rows[j].v, rows[4 + j].v, 0x20);
    columns[4 + j].v = _mm256_permute2f128_ps(rows[j].v, rows[4 + j].v, 0x31);
  }
}
#endif

}  // namespace tilerank::TR_RUNG
