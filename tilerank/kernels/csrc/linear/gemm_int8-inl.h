// The vector micro-kernels of int8: products of quantised rows with blocks of an int8 weight, compiled once per rung
// (no include guard; include after int8_rows-inl.h). Sums are exact in 32 bits: k is at most 2^17
// (weight_formats/int8.py), and 2^17 * 127 * 128 < 2^31.

#include "simd/transpose-inl.h"

namespace tilerank::TR_RUNG {

constexpr int kInt8Vecs = kBlockN / kLanes;
constexpr int kInt8VecsAtOnce = 2;  // vectors of a block that a micro-kernel multiplies at a time

// A quad is four consecutive inputs of a row, kQuadBytes in memory, which are broadcast to all lanes and multiplied
// with a vector of weights. pack_codes stores the quads of all rows side by side; the next quads follow `stride` bytes
// later.
#ifdef TR_AVX512
// vpdpbusd takes unsigned bytes on one side, so x is stored as code + 128; Int8Block::values subtracts the excess.
// Intermediate sums may wrap around.
constexpr int64_t kQuadBytes = 4;
constexpr int kInt8Rows = 14;

static inline void pack_codes(char* to, int64_t stride, const int8_t (&codes)[kInt8Rows][kInt8TileK], int64_t rows) {
  Ints lines[16] = {}, quads[16];
  for (int r = 0; r < kInt8Rows; ++r) lines[r] = differ(load_ints(codes[r]), bytes(-128));
  transpose(lines, quads);
  for (const Ints quad : quads) {
    store(to, quad, rows);
    to += stride;
  }
}
#else
// Products of pairs of 16-bit integers (vpmaddwd) are exact. A quad is stored as inputs 0 and 2, then 1 and 3.
constexpr int64_t kQuadBytes = 8;
constexpr int kInt8Rows = 5;

static inline void pack_codes(char* to, int64_t stride, const int8_t (&codes)[kInt8Rows][kInt8TileK], int64_t rows) {
  for (int64_t i = 0; i < kInt8TileK; i += 4, to += stride) {
    for (int64_t r = 0; r < rows; ++r) {
      const int16_t pairs[4] = {codes[r][i], codes[r][i + 2], codes[r][i + 1], codes[r][i + 3]};
      std::memcpy(to + r * kQuadBytes, pairs, kQuadBytes);
    }
  }
}
#endif

static inline Ints load_word(const char* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return words(word);
}

// Calls f(r) for every r < R; f must be inline as well. Unrolled through a fold instead of a loop, because GCC
// otherwise keeps the sums in memory. For the same reason the micro-kernels are functions of their own.
template <int R, class F>
[[gnu::always_inline]] static inline void for_int8_rows(const F& f) {
  [&]<int... r>(std::integer_sequence<int, r...>) { (f(r), ...); }(std::make_integer_sequence<int, R>{});
}

// sums += one quad of R rows x kInt8VecsAtOnce vectors of outputs.
template <int R>
static inline void dot_quads(const char* x, const int8_t* weight, Ints (&sums)[R][kInt8VecsAtOnce]) {
#ifdef TR_AVX512
  const Ints left = load_ints(weight), right = load_ints(weight + kInt8BlockStep / 2);
  for_int8_rows<R>([&](int r) __attribute__((always_inline)) {
    const Ints word = load_word(x + r * kQuadBytes);
    sums[r][0] = add_dot(sums[r][0], word, left);
    sums[r][1] = add_dot(sums[r][1], word, right);
  });
#else
  const Ints left = load_ints(weight), right = load_ints(weight + 32);
  const Ints left_even = shift_halves_right<8>(shift_halves_left<8>(left)), left_odd = shift_halves_right<8>(left);
  const Ints right_even = shift_halves_right<8>(shift_halves_left<8>(right)), right_odd = shift_halves_right<8>(right);
  for_int8_rows<R>([&](int r) __attribute__((always_inline)) {
    const Ints x_even = load_word(x + r * kQuadBytes), x_odd = load_word(x + r * kQuadBytes + 4);
    sums[r][0] = add(sums[r][0], add(dot(left_even, x_even), dot(left_odd, x_odd)));
    sums[r][1] = add(sums[r][1], add(dot(right_even, x_even), dot(right_odd, x_odd)));
  });
#endif
}

// Weights to prefetch during a product: `at` advances by `step` bytes with every quad.
struct Int8Prefetch {
  const int8_t* at;
  int64_t step;
};

constexpr int kInt8RowsInOrder = kLanes == 16 ? kRowsInOrder : 0;

#ifdef TR_AVX512
// sums += a tile (64 inputs) of R rows x one vector of outputs after the other, so that the weight is read in the order
// of memory.
template <int R>
static inline void dot_in_order(const char* x, const int8_t* weight, Int8Prefetch& ahead,
                                Ints (&sums)[R][kInt8VecsAtOnce]) {
#pragma GCC unroll 2
  for (int v = 0; v < kInt8VecsAtOnce; ++v) {
#pragma GCC unroll 4  // when it unrolls more, GCC moves all prefetches in front of the loads
    for (int64_t quad = 0; quad < kInt8TileK / 4; ++quad, ahead.at += ahead.step / 2) {
      _mm_prefetch(ahead.at, _MM_HINT_T0);
      const Ints w = load_ints(weight + v * kInt8BlockStep / 2 + quad * 64);
      for_int8_rows<R>([&](int r) __attribute__((always_inline)) {
        sums[r][v] = add_dot(sums[r][v], load_word(x + (quad * R + r) * kQuadBytes), w);
      });
    }
  }
}
#endif

// The micro-kernel: sums[R][kInt8Vecs] = or += R rows x kInt8VecsAtOnce vectors of outputs, over k_tiles * 64 inputs.
template <int R>
[[gnu::noinline]] static void multiply_int8_tile(const char* x, const int8_t* weight, int64_t k_tiles, Ints* sums,
                                                 bool first, Int8Prefetch ahead) {
  Ints own[R][kInt8VecsAtOnce] = {};
  for (int64_t t = 0; t < k_tiles; ++t, weight += kInt8BlockStep) {
#ifdef TR_AVX512
    if constexpr (R <= kInt8RowsInOrder) {
      dot_in_order<R>(x, weight, ahead, own);
      x += kInt8TileK / 4 * R * kQuadBytes;
      continue;
    }
#endif
    for (int64_t quad = 0; quad < kInt8TileK / 4; ++quad, x += R * kQuadBytes, ahead.at += ahead.step) {
      _mm_prefetch(ahead.at, _MM_HINT_T0);
      _mm_prefetch(ahead.at + 64, _MM_HINT_T0);
      dot_quads<R>(x, weight + quad * 64, own);
    }
  }
  for_int8_rows<R>([&](int r) __attribute__((always_inline)) {
    Ints* const to = sums + r * kInt8Vecs;
    to[0] = first ? own[r][0] : add(to[0], own[r][0]);
    to[1] = first ? own[r][1] : add(to[1], own[r][1]);
  });
}

template <int R>
static inline void multiply_int8_rows(int64_t rows, const char* x, const int8_t* weight, int64_t k_tiles, Ints* sums,
                                      bool first, Int8Prefetch ahead) {
  if constexpr (R > 0) {
    if (rows == R) return multiply_int8_tile<R>(x, weight, k_tiles, sums, first, ahead);
    multiply_int8_rows<R - 1>(rows, x, weight, k_tiles, sums, first, ahead);
  }
}

// One block of a weight.
struct Int8Block {
  const int8_t* codes;
  const float* scales;
  const int32_t* sums;

  Int8Block(const Int8Weight& w, int64_t block)
      : codes(w.codes.row<const int8_t>(block)),
        scales(w.scales.row<const float>(block)),
        sums(w.sums.row<const int32_t>(block)) {}

  // Returns the fp32 products of a row with the block, computed from its integer sums.
  Vec32 values(const Ints* row_sums, float row_scale) const {
    Vec32 to;
    for (int v = 0; v < kInt8Vecs; ++v) {
      Ints exact = row_sums[v];
#ifdef TR_AVX512
      exact = subtract(exact, shift_left<7>(load_ints(sums + v * kLanes)));
#endif
      to[v] = scaled(exact, row_scale, scales + v * kLanes);
    }
    return to;
  }
};

// Quantised rows that are multiplied with one block of the weight before the next, in tiles of about equal size:
// [tile][k / 4][rows of the tile][kQuadBytes].
struct Int8Stripe {
  char* codes;
  int64_t rows, k;

  static constexpr int64_t kMostRows = 20 * kInt8Rows;

  static int64_t row_bytes(int64_t k) { return int8_row_bytes(k) / 4 * kQuadBytes; }

  int64_t tiles() const { return blocks(rows, kInt8Rows); }
  int64_t first_row(int64_t tile) const { return rows * tile / tiles(); }
  int64_t rows_of(int64_t tile) const { return first_row(tile + 1) - first_row(tile); }
  char* tile_at(int64_t tile) const { return codes + first_row(tile) * row_bytes(k); }

  // Quantises the rows `own` and writes their scales to row_scales; input(row) points to the k inputs of a row.
  template <class Input>
  void put(Range own, const Input& input, float* row_scales) const {
    for (int64_t tile = 0; tile < tiles(); ++tile) {
      const int64_t first = first_row(tile);
      const Range some{std::max(own.begin, first), std::min(own.end, first_row(tile + 1))};
      if (some.begin < some.end) put_some(tile, some, input, row_scales);
    }
  }

  // sums[rows][kInt8Vecs] = the rows x a block. All tiles of rows are multiplied with one panel of the block, which
  // stays in the L1 cache, while the next panel is prefetched.
  void multiply(const int8_t* weight, Ints* sums) const {
    const int64_t count = tiles(), k_tiles = int8_row_bytes(k) / kInt8TileK;
    const int64_t panel = count > 4 ? 8 : 4;  // 16 KiB, or 8: with few rows, L1 also holds what is prefetched
    for (int64_t t = 0; t < k_tiles; t += panel, weight += panel * kInt8BlockStep) {
      const int64_t wide = std::min(panel, k_tiles - t), bytes = wide * kInt8BlockStep;
      for (int64_t tile = 0; tile < count; ++tile) {
        const int64_t own = rows_of(tile);
        const char* const x = tile_at(tile) + t * (kInt8TileK / 4) * own * kQuadBytes;
        const int64_t distance = count == 1 && own <= kInt8RowsInOrder && follows_streams() ? 0 : bytes;
        const Int8Prefetch ahead{weight + distance + bytes * tile / count, 128 / count};
        Ints* const to = sums + first_row(tile) * kInt8Vecs;
        for (int half = 0; half < kInt8Vecs / kInt8VecsAtOnce; ++half) {
          multiply_int8_rows<kInt8Rows>(own, x, weight + half * kInt8BlockStep / 2, wide, to + half * kInt8VecsAtOnce,
                                        t == 0, ahead);
        }
      }
    }
  }

  // Computes a result of all rows from `parts` blocks (1 or 2) of a weight, from `block` on. emit(row, sums, last)
  // receives the products of a row with the first and the last of them. sums: kSums integers
  template <class Emit>
  void multiply(const Int8Weight& w, int64_t block, int64_t parts, Ints* sums, const float* row_scales,
                const Emit& emit) const {
    const Int8Block first(w, block), last(w, block + parts - 1);
    Ints* const last_sums = sums + (parts - 1) * kMostRows * kInt8Vecs;
    multiply(first.codes, sums);
    if (parts == 2) multiply(last.codes, last_sums);
    for (int64_t row = 0; row < rows; ++row) {
      const Vec32 values = first.values(sums + row * kInt8Vecs, row_scales[row]);
      emit(row, values, parts == 2 ? last.values(last_sums + row * kInt8Vecs, row_scales[row]) : values);
    }
  }
  static constexpr int64_t kSums = 2 * kMostRows * kInt8Vecs;

 private:
  // Quantises rows of one tile.
  template <class Input>
  void put_some(int64_t tile, Range own, const Input& input, float* row_scales) const {
    float inverses[kInt8Rows];
    for (int64_t row = own.begin; row < own.end; ++row) {
      const Quantiser quantiser(largest_bits(input(row), k));
      inverses[row - own.begin] = quantiser.inverse, row_scales[row] = quantiser.scale;
    }
    const int64_t stride = rows_of(tile) * kQuadBytes;
    char* to = tile_at(tile) + (own.begin - first_row(tile)) * kQuadBytes;
    alignas(64) int8_t codes[kInt8Rows][kInt8TileK] = {};  // rows that are not finite keep these zeros
    for (int64_t i = 0; i < k; i += kInt8TileK, to += kInt8TileK / 4 * stride) {
      for (int64_t row = own.begin; row < own.end; ++row) {
        const float inverse = inverses[row - own.begin];
        if (inverse == 0) continue;
        store_codes(codes[row - own.begin], input(row) + i, std::min(kInt8TileK, k - i), set(inverse));
      }
      pack_codes(to, stride, codes, own.end - own.begin);
    }
  }
};

}  // namespace tilerank::TR_RUNG
