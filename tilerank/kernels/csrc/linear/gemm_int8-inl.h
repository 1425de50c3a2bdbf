// The forms of products of int8 activations with int8 weights, in vectors, compiled once per rung (no include guard;
// include after int8_rows-inl.h, and int8_stripes-inl.h after it). A step is 64 inputs.
//
//   Int8Form:       total = sum over steps of the row's scale of the step * sum(code of x * code of the weight),
//                   one fused multiply-add per step, in order
//   TokenInt8Form:  total = sum(code of x * code of the weight), an integer
//
// Integer sums are exact in 32 bits: k is at most 2^17 (weight_formats/int8.py), and 2^17 * 127 * 128 < 2^31. Weights
// are stored as code + 128; sums start from the products of the row's codes with -128. Intermediate sums may wrap
// around.

#include "linear/prefetch-inl.h"
#include "simd/transpose-inl.h"

namespace tilerank::TR_RUNG {

constexpr int kInt8Vecs = kBlockN / kLanes;
constexpr int kInt8VecsAtOnce = 2;  // vectors of a block that a micro-kernel multiplies at a time

// A quad is four consecutive inputs of a row, kQuadBytes in memory, which are broadcast to all lanes and multiplied
// with a vector of weights. A step of R rows is stored as
//
//   [quads][R][kQuadBytes], [R] int32 starts of its sums, [R] fp32 scales
//
// pack_codes stores the quads of `rows` of them, `stride` bytes apart, for `steps` steps of kInt8TileK codes, and their
// starts: -kZero times the sum of a row's codes. step_bytes: from one step to the next. Form::in_order, or place(i) for
// code i, says the order of the inputs.
#ifdef TR_AVX512
constexpr int64_t kQuadBytes = 4;
constexpr int kInt8Rows = 14;

template <class Form>
static inline void pack_codes(char* to, int64_t stride, int64_t step_bytes,
                              const int8_t (&codes)[kInt8Rows][kInt8TileK], int64_t rows, int64_t steps, char* starts) {
  constexpr int64_t kQuads = Form::kInputs / 4;
  Ints lines[16] = {}, quads[16];
  for (int r = 0; r < kInt8Rows; ++r) lines[r] = Form::in_order(load_ints(codes[r]));
  transpose(lines, quads);
  for (int64_t step = 0; step < steps; ++step, to += step_bytes, starts += step_bytes) {
    Ints excess{};
    for (int64_t i = 0; i < kQuads; ++i) {
      const Ints quad = quads[step * kQuads + i];
      store(to + i * stride, quad, rows);
      excess = add_dot(excess, bytes(Form::kZero), quad);
    }
    store(starts, subtract(Ints{}, excess), rows);
  }
}
#else
// Products of pairs of 16-bit integers (vpmaddwd) are exact. A quad is stored as inputs 0 and 2, then 1 and 3.
constexpr int64_t kQuadBytes = 8;
constexpr int kInt8Rows = 5;

template <class Form>
static inline void pack_codes(char* to, int64_t stride, int64_t step_bytes,
                              const int8_t (&codes)[kInt8Rows][kInt8TileK], int64_t rows, int64_t steps, char* starts) {
  for (int64_t step = 0; step < steps; ++step, to += step_bytes, starts += step_bytes) {
    for (int64_t r = 0; r < rows; ++r) {
      const int8_t* const own = codes[r] + step * Form::kInputs;
      const auto code = [&](int64_t input) -> int16_t { return own[Form::place(input)]; };
      int32_t sum = 0;
      for (int64_t i = 0; i < Form::kInputs; i += 4) {
        const int16_t pairs[4] = {code(i), code(i + 2), code(i + 1), code(i + 3)};
        std::memcpy(to + i / 4 * stride + r * kQuadBytes, pairs, kQuadBytes);
        for (const int16_t each : pairs) sum += each;
      }
      sum *= -Form::kZero;
      std::memcpy(starts + r * sizeof(sum), &sum, sizeof(sum));
    }
  }
}
#endif

// What is stored of the start of a row's sums in a step: the start, or its product with the scale of the row for forms
// whose sums start from zero.
template <class Form>
static inline int32_t stored_start(int32_t start, float scale) {
  if constexpr (!Form::kStarts) {
    const float product = static_cast<float>(start) * scale;
    std::memcpy(&start, &product, sizeof(start));
  }
  return start;
}

static inline Ints load_word(const char* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return words(word);
}
static inline float load_float(const char* p) {
  float x;
  std::memcpy(&x, p, 4);
  return x;
}

// Calls f(r) for every r < R; f must be inline as well. Unrolled through a fold instead of a loop, because GCC
// otherwise keeps the sums in memory. For the same reason the micro-kernels are functions of their own.
template <int R, class F>
[[gnu::always_inline]] static inline void for_int8_rows(const F& f) {
  [&]<int... r>(std::integer_sequence<int, r...>)
      __attribute__((always_inline)) { (f(r), ...); }(std::make_integer_sequence<int, R>{});
}

// sums = the starts of R rows.
template <int R>
[[gnu::always_inline]] static inline void start_sums(const char* starts, Ints (&sums)[R][kInt8VecsAtOnce]) {
  for_int8_rows<R>(
      [&](int r) __attribute__((always_inline)) { sums[r][0] = sums[r][1] = load_word(starts + r * sizeof(int32_t)); });
}

// sums += one quad of R rows x kInt8VecsAtOnce vectors of outputs. kHalfBytes: from 16 outputs to the next
template <int R, int64_t kHalfBytes>
[[gnu::always_inline]] static inline void dot_quads(const char* x, const char* weight,
                                                    Ints (&sums)[R][kInt8VecsAtOnce]) {
#ifdef TR_AVX512
  const Ints left = load_ints(weight), right = load_ints(weight + kHalfBytes);
  for_int8_rows<R>([&](int r) __attribute__((always_inline)) {
    const Ints word = load_word(x + r * kQuadBytes);
    sums[r][0] = add_dot(sums[r][0], left, word);
    sums[r][1] = add_dot(sums[r][1], right, word);
  });
#else
  const Ints left = load_ints(weight), right = load_ints(weight + 32);
  const Ints left_even = shift_halves_down<8>(shift_halves_left<8>(left)), left_odd = shift_halves_down<8>(left);
  const Ints right_even = shift_halves_down<8>(shift_halves_left<8>(right)), right_odd = shift_halves_down<8>(right);
  for_int8_rows<R>([&](int r) __attribute__((always_inline)) {
    const Ints x_even = load_word(x + r * kQuadBytes), x_odd = load_word(x + r * kQuadBytes + 4);
    sums[r][0] = add(sums[r][0], add(dot(left_even, x_even), dot(left_odd, x_odd)));
    sums[r][1] = add(sums[r][1], add(dot(right_even, x_even), dot(right_odd, x_odd)));
  });
#endif
}

// Weights to prefetch during a product: `at` advances by `step` bytes with every quad.
struct Int8Prefetch {
  const char* at;
  int64_t step;
};

constexpr int kInt8RowsInOrder = kLanes == 16 ? kRowsInOrder : 0;

#ifdef TR_AVX512
// sums += a step of R rows x one vector of outputs after the other, so that the weight is read in the order of memory.
template <int R>
[[gnu::always_inline]] static inline void dot_in_order(const char* x, const char* weight, Int8Prefetch& ahead,
                                                       Ints (&sums)[R][kInt8VecsAtOnce]) {
#pragma GCC unroll 2
  for (int v = 0; v < kInt8VecsAtOnce; ++v) {
#pragma GCC unroll 4  // when it unrolls more, GCC moves all prefetches in front of the loads
    for (int64_t quad = 0; quad < kInt8TileK / 4; ++quad, ahead.at += ahead.step / 2) {
      prefetch_weight<R>(ahead.at);
      const Ints w = load_ints(weight + v * kInt8BlockStep / 2 + quad * 64);
      for_int8_rows<R>([&](int r) __attribute__((always_inline)) {
        sums[r][v] = add_dot(sums[r][v], w, load_word(x + (quad * R + r) * kQuadBytes));
      });
    }
  }
}
#endif

// sums += the quads of kInputs inputs of R rows x kInt8VecsAtOnce vectors of outputs.
template <int R, int64_t kInputs>
[[gnu::always_inline]] static inline void dot_step(const char* x, const char* weight, Int8Prefetch& ahead,
                                                   Ints (&sums)[R][kInt8VecsAtOnce]) {
  int64_t quads = kInputs / 4;
  asm("" : "+r"(quads));  // of a loop with a known number of steps, GCC keeps the sums in memory
  for (int64_t quad = 0; quad < quads; ++quad, x += R * kQuadBytes, ahead.at += ahead.step) {
    prefetch_weight<R>(ahead.at);
    prefetch_weight<R>(ahead.at + 64);
    dot_quads<R, kInputs * kBlockN / 2>(x, weight + quad * 64, sums);
  }
}

struct Int8Form {
  using Products = Int8Form;  // the form whose micro-kernels multiply expanded weights
  using Weight = Int8Weight;
  using Sum = Vec;
  static constexpr bool kGrouped = true;                          // whether a step has a scale of its own
  static constexpr int64_t kInputs = kInt8TileK;                  // of a step
  static constexpr int64_t kRowCodes = kInputs / 4 * kQuadBytes;  // bytes of a row's codes for a step
  static constexpr int64_t kWeightBytes = kInt8BlockStep;         // of a block for a step, as it is multiplied
  static constexpr int64_t kStoredBytes = kWeightBytes;           // the same in memory
  static constexpr int64_t kFetches = kStoredBytes / 128;         // how often dot() advances its prefetches
  static constexpr int64_t kFewRowsPanel = 8 << 10;               // see Int8Stripe::multiply
  static constexpr bool kStarts = true;                           // whether sums start from the starts of rows
  static constexpr bool kExpands = false;                         // whether expanded() writes the weight elsewhere
  static constexpr int kExpandedRows = 0;  // up to which codes are expanded in registers, not to a panel
  static constexpr int64_t kHalfBytes = kWeightBytes / 2;  // between kInt8VecsAtOnce vectors and the next

  static void pack(char* to, int64_t stride, int64_t step_bytes, const int8_t (&codes)[kInt8Rows][kInt8TileK],
                   int64_t rows, int64_t steps, char* starts) {
    pack_codes<Int8Form>(to, stride, step_bytes, codes, rows, steps, starts);
  }
  template <int R>
  [[gnu::always_inline]] static void dot(const char* x, const char* weight, Int8Prefetch& ahead,
                                         Ints (&sums)[R][kInt8VecsAtOnce]) {
#ifdef TR_AVX512
    if constexpr (R <= kInt8RowsInOrder) return dot_in_order<R>(x, weight, ahead, sums);
#endif
    dot_step<R, kInputs>(x, weight, ahead, sums);
  }
  // Returns `steps` stored steps as they are multiplied. panel: memory for them
  static const char* expanded(const char* stored, int64_t, char* /* panel */) { return stored; }

  static constexpr int kZero = kInt8Zero;  // stored code of the number 0
  // The codes of a row in the order in which the weight has the inputs of a step.
  static Ints in_order(Ints codes) { return codes; }
  static constexpr int64_t place(int64_t i) { return i; }
#ifdef TR_AMX
  // Returns `steps` steps of a block's codes as right operands of tile products.
  static const char* tiles(const char* codes, int64_t, char*) { return codes; }
#endif

  // One block of a weight.
  struct Block {
    const char* codes;
    const float* scales;

    Block(const Weight& w, int64_t block)
        : codes(w.codes.row<const char>(block)), scales(w.scales.row<const float>(block)) {}

    // What the sums of a step are multiplied with beside the scale of the row.
    struct Step {
      Vec add(int, Ints sums, const char*, Vec row_scale, Vec total) const {
        return fma(to_vec(sums), row_scale, total);
      }
    };
    Step step(int64_t, int) const { return {}; }

    // Returns the products of a row with vector v of the block, from its total.
    Vec value(int v, Vec total, float) const { return total * load(scales + v * kLanes); }
  };
};

struct TokenInt8Form : Int8Form {
  using Products = TokenInt8Form;
  using Sum = Ints;
  static constexpr bool kGrouped = false;

  struct Block : Int8Form::Block {
    using Int8Form::Block::Block;
    Vec value(int v, Ints total, float row_scale) const { return scaled(total, row_scale, scales + v * kLanes); }
  };
};

}  // namespace tilerank::TR_RUNG
