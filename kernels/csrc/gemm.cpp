#ifndef TR_RUNG
#include "kernel.h"
#include "pack.h"

#define TR_SOURCE "gemm.cpp"
#include "foreach_isa.h"

#else
#include "epilogue.h"

namespace tilerank::TR_RUNG {

// A block of 32 outputs is kVecs vectors; kRows rows of sums fill the registers (with one weight and one input).
constexpr int kVecs = kBlockN / kLanes;
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
#ifdef TR_AVX512
  const __m512i w = _mm512_loadu_si512(weight);
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)), (__m512bh)w)};
#else
  const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight));
  const Vec even{_mm256_castsi256_ps(_mm256_slli_epi32(w, 16))};
  const Vec odd{_mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
  const Vec first{_mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(pair << 16)))};
  const Vec second{_mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(pair & 0xffff0000u)))};
  return fma(second, odd, fma(first, even, sum));
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

template <int R, class T>
static void rows_of_block(const Tensor& x, const T* weight, int64_t k, int64_t row, const Epilogue& epilogue,
                          int64_t column) {
  const T* inputs[R];
  for (int r = 0; r < R; ++r) inputs[r] = x.row<const T>(row + r);
  Vec sums[R][kVecs];
  for (auto& sum : sums) std::fill_n(sum, kVecs, zero());
  multiply<R>(inputs, weight, k, sums);
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kVecs; ++v) epilogue.write(sums[r][v], row + r, column + v * kLanes);
  }
}

template <int R, class T>
static void last_rows(int64_t count, const Tensor& x, const T* weight, int64_t k, int64_t row, const Epilogue& epilogue,
                      int64_t column) {
  if constexpr (R > 0) {
    if (count == R) return rows_of_block<R>(x, weight, k, row, epilogue, column);
    last_rows<R - 1>(count, x, weight, k, row, epilogue, column);
  }
}

template <class T>
static void linear(const Args& args, Team& team) {
  const Tensor &x = args.tensor(0), &weight = args.tensor(1);
  const Epilogue epilogue(args.tensor(2), args.tensor(3));
  const int64_t m = x.size[0], k = x.size[1];
  const int64_t block_elements = std::is_same_v<T, float> ? k * kBlockN : blocks(k, kBlockK) * 2 * kTile;
  const Range share = team.share(blocks(epilogue.n, kBlockN));
  for (int64_t block = share.begin; block < share.end; ++block) {
    const T* const data = weight.as<const T>() + block * block_elements;
    int64_t row = 0;
    for (; row + kRows <= m; row += kRows) rows_of_block<kRows>(x, data, k, row, epilogue, block * kBlockN);
    last_rows<kRows - 1>(m - row, x, data, k, row, epilogue, block * kBlockN);
  }
}

// tensors: x[m, k], packed weight, bias[n] or none, out[m, n]
static void linear_f32(const Args& args, Team& team) { linear<float>(args, team); }
TR_KERNEL(linear_f32)

// tensors: the same, and scratch that only the amx rung uses
static void linear_bf16(const Args& args, Team& team) { linear<bf16>(args, team); }
TR_KERNEL(linear_bf16)

}  // namespace tilerank::TR_RUNG
#endif
