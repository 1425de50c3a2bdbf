// The right-hand operands of latent attention, made from rows of the latent cache (included by latent_task-inl.h; no
// include guard). A panel has the layout of attention_product-inl.h.

namespace tilerank::TR_RUNG {

// panel[16 lanes] of every dim = 16 rows of `dims` values, `dims` elements apart. dims: a multiple of 16.
template <class P>
static void lanes_of_rows(const P* rows, int64_t dims, float* panel) {
  for (int64_t i = 0; i < dims; i += kLanes) {
    for (int64_t lane = 0; lane < 16; lane += kLanes) {
      Vec values[kLanes], columns[kLanes];
      for (int r = 0; r < kLanes; ++r) values[r] = load(rows + (lane + r) * dims + i);
      transpose(values, columns);
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
      store(to + token * 16, token < tokens ? load(rows + token * row_dims + i) : zero());
    }
  }
}

#ifdef TR_BF16
static inline __m512i load_32(const bf16* p) { return _mm512_loadu_si512(p); }
static inline __m512i load_32(const int8_t* p) {
  return narrow(load(p), load(p + 16));  // exact
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
