// Products of rows with one block of a packed weight, in vectors, for the rung that includes this file (no include
// guard).
#include "panels.h"

namespace tilerank::TR_RUNG {

// A block of 32 outputs is kVecs vectors; kRows rows of sums fill the registers (with one weight and one input).
constexpr int kRows = kLanes == 16 ? 12 : 3;

// Every sum runs over k in order, in one chain, whatever the number of rows: a row's bits do not depend on its batch.

template <int R>
static void multiply(const float* const* x, const float* weight, int64_t k, Vec (&sums)[R][kVecs]) {
  for (int64_t i = 0; i < k; ++i, weight += kBlockN) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      const Vec w = load(weight + v * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) sums[r][v] = fma(set(x[r][i]), w, sums[r][v]);
    }
  }
}

// Two products in one step: inputs 2i and 2i + 1 (one 32-bit word of x) with a vector of weight pairs.
static inline Vec dot_pair(uint32_t pair, const bf16* weight, Vec sum) {
#ifdef TR_BF16
  const __m512i w = _mm512_loadu_si512(weight);
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)), (__m512bh)w)};
#else
  const Two w = load_pairs(weight), x = set_pair(pair);
  return fma(x.b, w.b, fma(x.a, w.a, sum));
#endif
}

template <int R>
static void multiply(const bf16* const* x, const bf16* weight, int64_t k, Vec (&sums)[R][kVecs]) {
  for (int64_t i = 0; i < k; i += 2) {
    const bf16* const pairs = weight + i / kBlockK * 2 * kTile + i % kBlockK * 16;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      uint32_t pair = 0;
      std::memcpy(&pair, x[r] + i, i + 1 < k ? 4 : 2);  // the last input of an odd k goes with a zero
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        sums[r][v] = dot_pair(pair, pairs + v * kLanes / 16 * kTile + v * kLanes % 16 * 2, sums[r][v]);
      }
    }
  }
}

template <int R, class T, class Rows, class Emit>
static void rows_of_block(const Rows& rows, int64_t row, const T* weight, int64_t k, const Emit& emit) {
  const T* inputs[R];
  for (int r = 0; r < R; ++r) inputs[r] = rows(row + r);
  Vec sums[R][kVecs];
  for (auto& sum : sums) std::fill_n(sum, kVecs, zero());
  multiply<R>(inputs, weight, k, sums);
  for (int r = 0; r < R; ++r) emit(row + r, sums[r]);
}

template <int R, class T, class Rows, class Emit>
static void last_rows(int64_t count, const Rows& rows, int64_t row, const T* weight, int64_t k, const Emit& emit) {
  if constexpr (R > 0) {
    if (count == R) return rows_of_block<R>(rows, row, weight, k, emit);
    last_rows<R - 1>(count, rows, row, weight, k, emit);
  }
}

// emit(row, Vec[kVecs]) gets the sums of every row [0, m) with the block; rows(row) is where its k inputs are.
template <class T, class Rows, class Emit>
static void multiply_block(const Rows& rows, int64_t m, const T* weight, int64_t k, const Emit& emit) {
  int64_t row = 0;
  for (; row + kRows <= m; row += kRows) rows_of_block<kRows>(rows, row, weight, k, emit);
  last_rows<kRows - 1>(m - row, rows, row, weight, k, emit);
}

}  // namespace tilerank::TR_RUNG
