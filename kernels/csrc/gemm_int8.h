// Products of quantised rows with blocks of an int8 weight, in vectors, for the rung that includes this file (no
// include guard; int8_rows.h comes before). Sums are exact in 32 bits: k is at most 2^17 (linear_int8.py), 2^17 * 127 *
// 128 < 2^31.

#include "transpose.h"

namespace tilerank::TR_RUNG {

constexpr int kVecs8 = kBlockN / kLanes;
constexpr int kVecsAtOnce8 = 2;  // of a block

// What a vector of weights is multiplied with, four inputs at a time: kFour8 bytes, from memory into all lanes.
// pack_codes puts those of rows side by side, and the next ones of all `stride` bytes later.
#ifdef TR_AVX512
// The product takes one side without a sign: codes of x as code + 128. On the way sums may wrap around.
constexpr int64_t kFour8 = 4;
constexpr int kRows8 = 14;

static inline Ints dot(Ints sum, Ints x, Ints weight) { return _mm512_dpbusd_epi32(sum, x, weight); }

static inline void pack_codes(char* to, int64_t stride, const int8_t (&codes)[kRows8][kBlockK8], int64_t rows) {
  Ints lines[16] = {}, fours[16];
  for (int r = 0; r < kRows8; ++r) lines[r] = _mm512_xor_si512(load_ints(codes[r]), _mm512_set1_epi8(-128));
  transpose(lines, fours);
  for (const Ints four : fours) {
    _mm512_mask_storeu_epi32(to, first_lanes(rows), four);
    to += stride;
  }
}
#else
// Products of 16-bit pairs are exact: inputs 0 and 2, then 1 and 3.
constexpr int64_t kFour8 = 8;
constexpr int kRows8 = 5;

static inline void pack_codes(char* to, int64_t stride, const int8_t (&codes)[kRows8][kBlockK8], int64_t rows) {
  for (int64_t i = 0; i < kBlockK8; i += 4, to += stride) {
    for (int64_t r = 0; r < rows; ++r) {
      const int16_t pairs[4] = {codes[r][i], codes[r][i + 2], codes[r][i + 1], codes[r][i + 3]};
      std::memcpy(to + r * kFour8, pairs, kFour8);
    }
  }
}
#endif

static inline Ints load_word(const char* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
#ifdef TR_AVX512
  return _mm512_set1_epi32(word);
#else
  return _mm256_set1_epi32(word);
#endif
}

static inline Ints add(Ints a, Ints b) {
#ifdef TR_AVX512
  return _mm512_add_epi32(a, b);
#else
  return _mm256_add_epi32(a, b);
#endif
}

// f(r) for every r < R, which must be inline as well. No loop, and functions that are compiled for themselves: else GCC
// leaves sums in memory.
template <int R, class F>
[[gnu::always_inline]] static inline void for_rows8(const F& f) {
  [&]<int... r>(std::integer_sequence<int, r...>) { (f(r), ...); }(std::make_integer_sequence<int, R>{});
}

// Four inputs of R rows with kVecsAtOnce8 vectors of outputs.
template <int R>
static inline void dot_fours(const char* x, const int8_t* weight, Ints (&sums)[R][kVecsAtOnce8]) {
#ifdef TR_AVX512
  const Ints left = load_ints(weight), right = load_ints(weight + kBlockStep8 / 2);
  for_rows8<R>([&](int r) __attribute__((always_inline)) {
    const Ints word = load_word(x + r * kFour8);
    sums[r][0] = dot(sums[r][0], word, left);
    sums[r][1] = dot(sums[r][1], word, right);
  });
#else
  const Ints left = load_ints(weight), right = load_ints(weight + 32);
  const Ints left_even = _mm256_srai_epi16(_mm256_slli_epi16(left, 8), 8), left_odd = _mm256_srai_epi16(left, 8);
  const Ints right_even = _mm256_srai_epi16(_mm256_slli_epi16(right, 8), 8), right_odd = _mm256_srai_epi16(right, 8);
  for_rows8<R>([&](int r) __attribute__((always_inline)) {
    const Ints x_even = load_word(x + r * kFour8), x_odd = load_word(x + r * kFour8 + 4);
    sums[r][0] = add(sums[r][0], add(_mm256_madd_epi16(left_even, x_even), _mm256_madd_epi16(left_odd, x_odd)));
    sums[r][1] = add(sums[r][1], add(_mm256_madd_epi16(right_even, x_even), _mm256_madd_epi16(right_odd, x_odd)));
  });
#endif
}

// What is asked for of the weight while another part of it is multiplied: `step` bytes on for every four inputs.
struct Ahead8 {
  const int8_t* at;
  int64_t step;
};

constexpr int kRowsInOrder8 = kLanes == 16 ? kRowsInOrder : 0;

#ifdef TR_AVX512
// Of R rows with one vector of outputs after the other, 64 inputs of each.
template <int R>
static inline void dot_in_order(const char* x, const int8_t* weight, Ahead8& ahead, Ints (&sums)[R][kVecsAtOnce8]) {
#pragma GCC unroll 2
  for (int v = 0; v < kVecsAtOnce8; ++v) {
#pragma GCC unroll 4  // all at once, and GCC gathers the requests in front of the loads
    for (int64_t four = 0; four < kBlockK8 / 4; ++four, ahead.at += ahead.step / 2) {
      _mm_prefetch(ahead.at, _MM_HINT_T0);
      const Ints w = load_ints(weight + v * kBlockStep8 / 2 + four * 64);
      for_rows8<R>([&](int r) __attribute__((always_inline)) {
        sums[r][v] = dot(sums[r][v], load_word(x + (four * R + r) * kFour8), w);
      });
    }
  }
}
#endif

// sums[R][kVecs8] += a tile of R rows x kVecsAtOnce8 vectors of a panel of a block, k_tiles * 64 inputs.
template <int R>
[[gnu::noinline]] static void multiply_tile8(const char* x, const int8_t* weight, int64_t k_tiles, Ints* sums,
                                             bool first, Ahead8 ahead) {
  Ints own[R][kVecsAtOnce8] = {};
  for (int64_t t = 0; t < k_tiles; ++t, weight += kBlockStep8) {
#ifdef TR_AVX512
    if constexpr (R <= kRowsInOrder8) {
      dot_in_order<R>(x, weight, ahead, own);
      x += kBlockK8 / 4 * R * kFour8;
      continue;
    }
#endif
    for (int64_t four = 0; four < kBlockK8 / 4; ++four, x += R * kFour8, ahead.at += ahead.step) {
      _mm_prefetch(ahead.at, _MM_HINT_T0);
      _mm_prefetch(ahead.at + 64, _MM_HINT_T0);
      dot_fours<R>(x, weight + four * 64, own);
    }
  }
  for_rows8<R>([&](int r) __attribute__((always_inline)) {
    Ints* const to = sums + r * kVecs8;
    to[0] = first ? own[r][0] : add(to[0], own[r][0]);
    to[1] = first ? own[r][1] : add(to[1], own[r][1]);
  });
}

template <int R>
static inline void multiply_some8(int64_t rows, const char* x, const int8_t* weight, int64_t k_tiles, Ints* sums,
                                  bool first, Ahead8 ahead) {
  if constexpr (R > 0) {
    if (rows == R) return multiply_tile8<R>(x, weight, k_tiles, sums, first, ahead);
    multiply_some8<R - 1>(rows, x, weight, k_tiles, sums, first, ahead);
  }
}

// One of the blocks of a weight, whose operands are codes, scales and sums.
struct Block8 {
  const int8_t* codes;
  const float* scales;
  const int32_t* sums;

  Block8(const Tensor* weight, int64_t block, int64_t k)
      : codes(weight[0].as<const int8_t>() + block * row_bytes8(k) * kBlockN),
        scales(weight[1].as<const float>() + block * kBlockN),
        sums(weight[2].as<const int32_t>() + block * kBlockN) {}
};

// Quantised rows that are multiplied with a block before the next, in tiles of about equal size:
// [tile][k / 4][rows of the tile][kFour8].
struct Stripe8 {
  char* codes;
  int64_t rows, k;

  static constexpr int64_t kMostRows = 20 * kRows8;

  static int64_t row_bytes(int64_t k) { return row_bytes8(k) / 4 * kFour8; }

  int64_t tiles() const { return blocks(rows, kRows8); }
  int64_t first_row(int64_t tile) const { return rows * tile / tiles(); }
  int64_t rows_of(int64_t tile) const { return first_row(tile + 1) - first_row(tile); }
  char* tile_at(int64_t tile) const { return codes + first_row(tile) * row_bytes(k); }

  // Quantises rows [own.begin, own.end), input(row) is where the k inputs of a row are, and gives their steps.
  template <class Input>
  void put(Range own, const Input& input, float* steps) const {
    for (int64_t tile = 0; tile < tiles(); ++tile) {
      const int64_t first = first_row(tile);
      const Range some{std::max(own.begin, first), std::min(own.end, first_row(tile + 1))};
      if (some.begin < some.end) put_some(tile, some, input, steps);
    }
  }

  // sums[rows][kVecs8] = the rows x a block. The panel of the weight that is multiplied stays in the first-level cache,
  // and the next one comes to the second meanwhile.
  void multiply(const int8_t* weight, Ints* sums) const {
    const int64_t count = tiles(), k_tiles = row_bytes8(k) / kBlockK8;
    const int64_t panel = count > 4 ? 8 : 4;  // 16 KiB, or 8: of few rows what is asked for has to go there as well
    for (int64_t t = 0; t < k_tiles; t += panel, weight += panel * kBlockStep8) {
      const int64_t wide = std::min(panel, k_tiles - t), bytes = wide * kBlockStep8;
      for (int64_t tile = 0; tile < count; ++tile) {
        const int64_t own = rows_of(tile);
        const char* const x = tile_at(tile) + t * (kBlockK8 / 4) * own * kFour8;
        const int64_t distance = count == 1 && own <= kRowsInOrder8 && follows_streams() ? 0 : bytes;
        const Ahead8 ahead{weight + distance + bytes * tile / count, 128 / count};
        Ints* const to = sums + first_row(tile) * kVecs8;
        for (int half = 0; half < kVecs8 / kVecsAtOnce8; ++half) {
          multiply_some8<kRows8>(own, x, weight + half * kBlockStep8 / 2, wide, to + half * kVecsAtOnce8, t == 0,
                                 ahead);
        }
      }
    }
  }

  // The values that sums of a row with a block stand for.
  static void values(const Ints* sums, int64_t row, float step, const Block8& block, Vec (&to)[kVecs8]) {
    for (int v = 0; v < kVecs8; ++v) {
      Ints exact = sums[row * kVecs8 + v];
#ifdef TR_AVX512
      exact = _mm512_sub_epi32(exact, _mm512_slli_epi32(load_ints(block.sums + v * kLanes), 7));
#endif
      to[v] = scaled(exact, step, block.scales + v * kLanes);
    }
  }

 private:
  // The same of rows of one tile.
  template <class Input>
  void put_some(int64_t tile, Range own, const Input& input, float* steps) const {
    float inverses[kRows8];
    for (int64_t row = own.begin; row < own.end; ++row) {
      const Quantiser quantiser(largest_bits(input(row), k));
      inverses[row - own.begin] = quantiser.inverse, steps[row] = quantiser.step;
    }
    const int64_t stride = rows_of(tile) * kFour8;
    char* to = tile_at(tile) + (own.begin - first_row(tile)) * kFour8;
    alignas(64) int8_t codes[kRows8][kBlockK8] = {};  // as they stay for rows that are not finite
    for (int64_t i = 0; i < k; i += kBlockK8, to += kBlockK8 / 4 * stride) {
      for (int64_t row = own.begin; row < own.end; ++row) {
        const float inverse = inverses[row - own.begin];
        if (inverse == 0) continue;
        store_codes(codes[row - own.begin], input(row) + i, std::min(kBlockK8, k - i), set(inverse));
      }
      pack_codes(to, stride, codes, own.end - own.begin);
    }
  }
};

}  // namespace tilerank::TR_RUNG
