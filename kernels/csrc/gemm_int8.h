// Products of quantised rows with one block of an int8 weight, in vectors, for the rung that includes this file (no
// include guard). Sums are exact in 32 bits: k is at most 2^17 (linear_int8.py), 2^17 * 127 * 128 < 2^31.

namespace tilerank::TR_RUNG {

constexpr int kVecs8 = kBlockN / kLanes;
constexpr int kRows8 = kLanes == 16 ? 12 : 3;

// Where the sums of a row start. The AVX-512 product takes one side without a sign: weights are read as code + 128, and
// 128 times the sum of the row's codes is what that is too much; on the way it may wrap around.
static inline Ints first_sum(const int8_t* row, int64_t k) {
#ifdef TR_AVX512
  Ints sums = _mm512_setzero_si512();
  for (int64_t i = 0; i < k; i += 64) sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), load_ints(row + i));
  return _mm512_set1_epi32(-128 * _mm512_reduce_add_epi32(sums));
#else
  (void)row, (void)k;
  return _mm256_setzero_si256();
#endif
}

// Four inputs (one 32-bit word of a row) of R rows with kLanes outputs.
template <int R>
static inline void dot_fours(const int8_t* const* rows, int64_t i, const int8_t* weight, Ints (&sums)[R][kVecs8],
                             int v) {
  const auto word = [&](int r) {
    int32_t four;
    std::memcpy(&four, rows[r] + i, 4);
    return four;
  };
#ifdef TR_AVX512
  const Ints w = _mm512_xor_si512(load_ints(weight), _mm512_set1_epi8(-128));
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], w, _mm512_set1_epi32(word(r)));
#else
  // Products of 16-bit pairs are exact, too: inputs 0 and 2, then 1 and 3.
  const Ints w = load_ints(weight);
  const Ints even = _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8), odd = _mm256_srai_epi16(w, 8);
#pragma GCC unroll 3
  for (int r = 0; r < R; ++r) {
    const Ints x = _mm256_set1_epi32(word(r));
    const Ints x_even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), x_odd = _mm256_srai_epi16(x, 8);
    const Ints both = _mm256_add_epi32(_mm256_madd_epi16(even, x_even), _mm256_madd_epi16(odd, x_odd));
    sums[r][v] = _mm256_add_epi32(sums[r][v], both);
  }
#endif
}

template <int R, class Emit>
static void rows_of_block8(const int8_t* rows, int64_t row_bytes, int64_t row, const int8_t* weight, const Emit& emit) {
  const int8_t* inputs[R];
  Ints sums[R][kVecs8];
  for (int r = 0; r < R; ++r) {
    inputs[r] = rows + (row + r) * row_bytes;
    std::fill_n(sums[r], kVecs8, first_sum(inputs[r], row_bytes));
  }
  for (int64_t i = 0; i < row_bytes; i += 4) {
    const int8_t* const fours = weight + i / kBlockK8 * kBlockStep8 + i % kBlockK8 * 16;
#pragma GCC unroll 4
    for (int v = 0; v < kVecs8; ++v) {
      dot_fours<R>(inputs, i, fours + v * kLanes / 16 * 1024 + v * kLanes % 16 * 4, sums, v);
    }
  }
  for (int r = 0; r < R; ++r) emit(row + r, sums[r]);
}

template <int R, class Emit>
static void last_rows8(int64_t count, const int8_t* rows, int64_t row_bytes, int64_t row, const int8_t* weight,
                       const Emit& emit) {
  if constexpr (R > 0) {
    if (count == R) return rows_of_block8<R>(rows, row_bytes, row, weight, emit);
    last_rows8<R - 1>(count, rows, row_bytes, row, weight, emit);
  }
}

// emit(row, Ints[kVecs8]) gets the sums of every row [0, m) with the block.
template <class Emit>
static void multiply_block8(const int8_t* rows, int64_t row_bytes, int64_t m, const int8_t* weight, const Emit& emit) {
  int64_t row = 0;
  for (; row + kRows8 <= m; row += kRows8) rows_of_block8<kRows8>(rows, row_bytes, row, weight, emit);
  last_rows8<kRows8 - 1>(m - row, rows, row_bytes, row, weight, emit);
}

}  // namespace tilerank::TR_RUNG
