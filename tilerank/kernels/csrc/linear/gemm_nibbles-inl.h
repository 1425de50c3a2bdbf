// The form of products of int8 activations with int4 and MXFP4 weights (block_scaled.h), in vectors, compiled once per
// rung (no include guard; include after gemm_int8-inl.h and nibbles-inl.h).
//
//   total += scale[g] * (the row's scale of the step * (sum(code of x * value) - zero[g] * sum(code of x)))
//
// for each step, in order: one multiplication and one fused multiply-add. A step is 64 inputs, or 32 if a group g of
// the weight is no multiple of 64. Sums are exact, and so is their correction by the zero point. Numbers are those of
// int4, and twice the values of E2M1. They are expanded to number + kZero; sums start from the products of the row's
// codes with -kZero.
//
// A step of rows is stored as in gemm_int8-inl.h, but with quads of 4 bytes on every rung: of every eight inputs 0, 4,
// 1 and 5, then 2, 6, 3 and 7, the order in which the nibbles of a weight are expanded.

namespace tilerank::TR_RUNG {

constexpr int64_t kNibbleTileInputs = 32, kNibbleTileBytes = 512;  // of both halves of a block

struct Int4Numbers {
  using Scale = f16;
  static constexpr int kZero = 8, kMost = 15;  // the largest number + kZero
  static constexpr bool kMayHaveZeros = true;
  static constexpr float kUnit = kGroupScaleUnit;

  // The numbers of eight inputs of kLanes outputs, as two quads of unsigned bytes.
  struct Line {
    Ints codes;

#ifdef TR_AVX512
    explicit Line(const char* at) : codes(load_ints(at)) {}
    Ints low() const { return differ_both(codes, bytes(0x0f), bytes(kZero)); }
    Ints high() const { return differ_both(shift_down<4>(codes), bytes(0x0f), bytes(kZero)); }
#else
    explicit Line(const char* at) : codes(differ(load_ints(at), bytes(kZero * 0x11))) {}
    Ints low() const { return both(codes, bytes(0x0f)); }
    Ints high() const { return both(shift_halves_down<4>(codes), bytes(0x0f)); }
#endif
  };
  static Vec scales(const f16* at) { return load(at); }
};

struct E2m1Numbers {
  using Scale = uint8_t;
  static constexpr int kZero = 12, kMost = 24;
  static constexpr bool kMayHaveZeros = false;
  static constexpr float kUnit = 0.5f;

  struct Line {
    alignas(16) static constexpr int8_t kNumbers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    Ints codes;

    explicit Line(const char* at) : codes(load_ints(at)) {}
    Ints low() const { return lookup_nibbles(kNumbers, both(codes, bytes(0x0f))); }
    Ints high() const { return lookup_nibbles(kNumbers, both(shift_halves_down<4>(codes), bytes(0x0f))); }
  };
  static Vec scales(const uint8_t* at) { return powers_of_two(at); }
};

template <class Numbers, int64_t kStepInputs>
struct NibbleForm {
  using Products = NibbleForm;
  using Line = typename Numbers::Line;
  using Weight = OutputScaledWeight;
  using Sum = Vec;
  static constexpr bool kGrouped = true;
  static constexpr int64_t kInputs = kStepInputs;
  static constexpr int64_t kRowCodes = kInputs;
  static constexpr int64_t kWeightBytes = kInputs / kNibbleTileInputs * kNibbleTileBytes;
  static constexpr int64_t kStoredBytes = kWeightBytes;
  static constexpr int64_t kFetches = kStoredBytes / 128;
  static constexpr int64_t kFewRowsPanel = 8 << 10;
  static constexpr bool kStarts = true, kExpands = false;
  static constexpr int kExpandedRows = 0;
  static constexpr int64_t kHalfBytes = kNibbleTileBytes / 2;
  static constexpr int64_t kLines = 4;  // of half a tile

  // As pack_codes, with quads of 4 bytes.
  static void pack(char* to, int64_t stride, int64_t step_bytes, const int8_t (&codes)[kInt8Rows][kInt8TileK],
                   int64_t rows, int64_t steps, char* starts) {
#ifdef TR_AVX512
    pack_codes<NibbleForm>(to, stride, step_bytes, codes, rows, steps, starts);
#else
    for (int64_t step = 0; step < steps; ++step, to += step_bytes, starts += step_bytes) {
      for (int64_t r = 0; r < rows; ++r) {
        int32_t sum = 0;
        for (int64_t i = 0; i < kInputs; i += 32) {
          alignas(32) int8_t ordered[32];
          store(ordered, in_nibble_order(load_ints(codes[r] + step * kInputs + i)));
          for (int64_t j = 0; j < 32; j += 4) std::memcpy(to + (i + j) / 4 * stride + r * 4, ordered + j, 4);
          for (const int8_t code : ordered) sum += code;
        }
        sum *= -kZero;
        std::memcpy(starts + r * sizeof(sum), &sum, sizeof(sum));
      }
    }
#endif
  }

  template <int R>
  [[gnu::always_inline]] static void dot(const char* x, const char* weight, Int8Prefetch& ahead,
                                         Ints (&sums)[R][kInt8VecsAtOnce]) {
    int64_t tiles = kInputs / kNibbleTileInputs;
    asm("" : "+r"(tiles));  // as in dot_step
    for (int64_t i = 0; i < tiles; ++i) {
      dot_tile<R>(x + i * R * kNibbleTileInputs, weight + i * kNibbleTileBytes, ahead, sums);
    }
  }

  static const char* expanded(const char* stored, int64_t, char*) { return stored; }

  static constexpr int kZero = Numbers::kZero;
  static Ints in_order(Ints codes) { return in_nibble_order(codes); }
#ifdef TR_AMX
  static const char* tiles(const char* codes, int64_t steps, char* expanded) {
    char* to = expanded;
    for (int64_t step = 0; step < steps; ++step, codes += kWeightBytes) {
      for (int half = 0; half < 2; ++half) {
        for (int64_t i = 0; i < kInputs / 8; ++i, to += 128) {
          const Line line(codes + i / 4 * kNibbleTileBytes + half * kHalfBytes + i % 4 * 64);
          store(to, line.low());
          store(to + 64, line.high());
        }
      }
    }
    return expanded;
  }
#endif

  struct Block {
    using Scale = typename Numbers::Scale;
    const char* codes;

    Block(const Weight& w, int64_t block)
        : codes(w.values.row<const char>(block)),
          scales_(w.scales.row<const Scale>(block)),
          zeros_(w.zeros ? w.zeros.row<const int8_t>(block) : nullptr),
          steps_(w.scales.size[1] == 1 ? int64_t{1} << 62 : w.values.size[2] * kNibbleTileInputs / kInputs) {}

    struct Step {
      Vec scales[kInt8VecsAtOnce], zeros[kInt8VecsAtOnce];
      bool has_zeros;

      Vec add(int v, Ints sums, const char* start, Vec row_scale, Vec total) const {
        Vec exact = to_vec(sums);
        if (Numbers::kMayHaveZeros && has_zeros) exact = fma(zeros[v], to_vec(load_word(start)), exact);
        return fma(exact * row_scale, scales[v], total);
      }
    };
    Step step(int64_t step, int half) const {
      const int64_t place = step / steps_ * kBlockN + half * kInt8VecsAtOnce * kLanes;
      Step of;
      of.has_zeros = zeros_ != nullptr;
      for (int v = 0; v < kInt8VecsAtOnce; ++v) {
        of.scales[v] = Numbers::scales(scales_ + place + v * kLanes);
        if constexpr (Numbers::kMayHaveZeros) {  // sums start from -kZero times the sum of the codes
          if (zeros_) of.zeros[v] = load(zeros_ + place + v * kLanes) * set(1.0f / kZero);
        }
      }
      return of;
    }

    Vec value(int, Vec total, float) const { return total * set(Numbers::kUnit); }

   private:
    const Scale* const scales_;
    const int8_t* const zeros_;
    const int64_t steps_;  // that share a scale
  };

 private:
  // sums += the products of a tile, and of its second half kHalfBytes on, with R rows.
#ifdef TR_AVX512
  template <int R>
  [[gnu::always_inline]] static void dot_tile(const char* x, const char* tile, Int8Prefetch& ahead,
                                              Ints (&sums)[R][kInt8VecsAtOnce]) {
    if constexpr (R <= kInt8RowsInOrder) {
#pragma GCC unroll 2
      for (int v = 0; v < kInt8VecsAtOnce; ++v) dot_in_order<R>(x, tile + v * kHalfBytes, ahead, v, sums);
    } else {
      dot_lines<R, kLines>(x, tile, kHalfBytes, ahead, sums);
    }
  }

  // The same for one half.
  template <int R>
  [[gnu::always_inline]] static void dot_in_order(const char* x, const char* half, Int8Prefetch& ahead, int v,
                                                  Ints (&sums)[R][kInt8VecsAtOnce]) {
    int64_t lines = kLines;
    asm("" : "+r"(lines));  // as in dot_step
    for (int64_t i = 0; i < lines; ++i, x += 2 * R * 4, ahead.at += ahead.step / 2) {
      prefetch_weight<R>(ahead.at);
      const Line line(half + i * 64);
      const Ints low = line.low(), high = line.high();
      for_int8_rows<R>([&](int r) __attribute__((always_inline)) {
        sums[r][v] = add_dot(sums[r][v], low, load_word(x + r * 4));
        sums[r][v] = add_dot(sums[r][v], high, load_word(x + (R + r) * 4));
      });
    }
  }

  [[gnu::always_inline]] static void add_quad(Ints& sums, Ints values, Ints word) {
    sums = add_dot(sums, values, word);
  }
#else
  // So many lines of a tile, of four products each, have sums that fit into 16 bits.
  static constexpr int64_t kLinesOfSum = Numbers::kMost * 127 * 4 * kLines < 1 << 15 ? kLines : kLines / 2;
  static_assert(Numbers::kMost * 127 * 4 * kLinesOfSum < 1 << 15);

  template <int R>
  [[gnu::always_inline]] static void dot_tile(const char* x, const char* tile, Int8Prefetch& ahead,
                                              Ints (&sums)[R][kInt8VecsAtOnce]) {
    for (int64_t line = 0; line < kLines; line += kLinesOfSum) {
      Ints own[R][kInt8VecsAtOnce] = {};
      dot_lines<R, kLinesOfSum>(x + line * 2 * R * 4, tile + line * 64, kHalfBytes / 8, ahead, own);
      for_int8_rows<R>([&](int r) __attribute__((always_inline)) {
        sums[r][0] = add(sums[r][0], TR_RUNG::dot(own[r][0], halves(1)));
        sums[r][1] = add(sums[r][1], TR_RUNG::dot(own[r][1], halves(1)));
      });
    }
  }

  [[gnu::always_inline]] static void add_quad(Ints& sums, Ints values, Ints word) {
    sums = add_halves(sums, dot_bytes(values, word));
  }
#endif

  // sums += the products of kCount lines. step: bytes from a line of the first vector to that of the second.
  template <int R, int64_t kCount>
  [[gnu::always_inline]] static void dot_lines(const char* x, const char* tile, int64_t step, Int8Prefetch& ahead,
                                               Ints (&sums)[R][kInt8VecsAtOnce]) {
    const auto dot_quads = [&](Ints left, Ints right, const char* words) __attribute__((always_inline)) {
      for_int8_rows<R>([&](int r) __attribute__((always_inline)) {
        const Ints word = load_word(words + r * 4);
        add_quad(sums[r][0], left, word);
        add_quad(sums[r][1], right, word);
      });
    };
    int64_t lines = kCount;
    asm("" : "+r"(lines));  // as in dot_step
    for (int64_t i = 0; i < lines; ++i, x += 2 * R * 4, ahead.at += ahead.step) {
      prefetch_weight<R>(ahead.at);
      prefetch_weight<R>(ahead.at + 64);
      const Line left(tile + i * 64), right(tile + i * 64 + step);
      dot_quads(left.low(), right.low(), x);
      dot_quads(left.high(), right.high(), x + R * 4);
    }
  }
};

// The forms of weights with different K-blocks.
struct Int4Forms {
  using Weight = OutputScaledWeight;
  using First = NibbleForm<Int4Numbers, 64>;
  using Second = NibbleForm<Int4Numbers, 32>;

  // Calls f with the form of the products of a weight.
  template <class F>
  static void with(const Weight& w, const F& f) {
    const bool wide = w.values.size[2] * kNibbleTileInputs % 64 == 0;  // the inputs of a K-block
    wide ? f(First()) : f(Second());
  }
};

using Mxfp4Form = NibbleForm<E2m1Numbers, 32>;

}  // namespace tilerank::TR_RUNG
