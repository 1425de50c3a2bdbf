// The right-hand operands of latent attention, made from rows of the latent cache (included by latent_task-inl.h; no
// include guard). A panel has the layout of attention_product-inl.h.

namespace tilerank::TR_RUNG {

// Loads kLanes values as floats.
template <class P>
static inline Vec load_wide(const P* p) {
  if constexpr (!std::is_same_v<P, int8_t>) {
    return load(p);
#ifdef TR_AVX512
  } else {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
#else
  } else {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
#endif
  }
}

#ifdef TR_AVX512
static inline void transpose_lanes(Vec (&rows)[16], Vec (&columns)[16]) {
  __m512i from[16], to[16];
  for (int i = 0; i < 16; ++i) from[i] = _mm512_castps_si512(rows[i].v);
  transpose(from, to);
  for (int i = 0; i < 16; ++i) columns[i].v = _mm512_castsi512_ps(to[i]);
}
#else
static inline void transpose_lanes(Vec (&rows)[8], Vec (&columns)[8]) {
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

// panel[16 lanes] of every dim = 16 rows of `dims` values, `dims` elements apart. dims: a multiple of 16.
template <class P>
static void lanes_of_rows(const P* rows, int64_t dims, float* panel) {
  for (int64_t i = 0; i < dims; i += kLanes) {
    for (int64_t lane = 0; lane < 16; lane += kLanes) {
      Vec values[kLanes], columns[kLanes];
      for (int r = 0; r < kLanes; ++r) values[r] = load_wide(rows + (lane + r) * dims + i);
      transpose_lanes(values, columns);
      for (int c = 0; c < kLanes; ++c) store(panel + (i + c) * 16 + lane, columns[c]);
    }
  }
}

// panel[16 dims] of every group and token = rows of values; `stride` is that of a group.
template <class P>
static void lanes_of_dims(const P* rows, int64_t row_dims, int64_t tokens, int64_t dims, float* panel, int64_t stride) {
  for (int64_t i = 0; i < dims; i += kLanes) {
    float* const to = panel + i / 16 * stride + i % 16;
    for (int64_t token = 0; token < kPageTokens; ++token) {
      store(to + token * 16, token < tokens ? load_wide(rows + token * row_dims + i) : zero());
    }
  }
}

#ifdef TR_BF16
static inline __m512i load_32(const bf16* p) { return _mm512_loadu_si512(p); }
static inline __m512i load_32(const int8_t* p) {
  return (__m512i)_mm512_cvtne2ps_pbh(load_wide(p + 16).v, load_wide(p).v);  // exact
}

// The same two in pairs: of dims, and of tokens. dims: a multiple of 32.
template <class P>
static void lanes_of_rows(const P* rows, int64_t dims, bf16* panel) {
  for (int64_t i = 0; i < dims; i += 32, panel += 16 * 32) {
    __m512i values[16], columns[16];
    for (int r = 0; r < 16; ++r) values[r] = load_32(rows + r * dims + i);
    transpose(values, columns);
    for (int c = 0; c < 16; ++c) _mm512_store_si512(panel + c * 32, columns[c]);
  }
}
template <class P>
static void lanes_of_dims(const P* rows, int64_t row_dims, int64_t tokens, int64_t dims, bf16* panel, int64_t stride) {
  alignas(64) static constexpr uint16_t kPairs[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i lower = _mm512_load_si512(kPairs), upper = _mm512_add_epi16(lower, _mm512_set1_epi16(16));
  for (int64_t i = 0; i < dims; i += 32, panel += 2 * stride) {
    for (int64_t token = 0; token < kPageTokens; token += 2) {
      const P* const row = rows + token * row_dims + i;
      const __m512i even = token < tokens ? load_32(row) : _mm512_setzero_si512();
      const __m512i odd = token + 1 < tokens ? load_32(row + row_dims) : _mm512_setzero_si512();
      _mm512_store_si512(panel + token * 16, _mm512_permutex2var_epi16(even, lower, odd));
      _mm512_store_si512(panel + stride + token * 16, _mm512_permutex2var_epi16(even, upper, odd));
    }
  }
}
#endif

}  // namespace tilerank::TR_RUNG
