// The forms of products of int8 activations with weights in the block formats of GGUF (gguf.h), compiled once per rung
// (no include guard; include after gemm_int8-inl.h and gguf_codes-inl.h, and before int8_stripes-inl.h).
//
//   total += scale[g] * (the row's scale of the step * sum(code of x * number)),
//   total += minimum[g] * (the row's scale of the step * sum(code of x)) in formats that have minimums
//
// for each step, in order: a multiplication and a fused multiply-add each. A step is a group g of the weight, 16 or 32
// inputs. Sums are exact. A panel of codes is expanded to bytes, in the L1 cache, once for all rows; what multiplies it
// is the same for all codes (GgufProducts).

namespace tilerank::TR_RUNG {

// kNibbles: as in GgufFactors.
template <int64_t kGroup, bool kHasMinimums, bool kNibbles>
struct GgufProducts {
  using Products = GgufProducts;
  using Weight = GgufWeight;
  using Sum = Vec;
  static constexpr bool kGrouped = true, kExpands = true;
  static constexpr bool kStarts = !kHasMinimums;  // else the start is -sum(codes of x), for the minimum
  static constexpr int64_t kInputs = kGroup;
  static constexpr int64_t kRowCodes = kInputs / 4 * kQuadBytes;
  static constexpr int64_t kWeightBytes = kInputs * kBlockN;
  static constexpr int64_t kHalfBytes = kWeightBytes / 2;
  static constexpr int64_t kFetches = kInputs / 4;
  static constexpr int64_t kFewRowsPanel = 2 << 10;  // short, so that memory is read while a panel is multiplied
  static constexpr int kExpandedRows = kLanes == 16 ? 4 : 0;
  static constexpr int64_t kAhead = 4 << 10;  // bytes between codes that are expanded and those that are prefetched

  template <int R>
  [[gnu::always_inline]] static void dot(const char* x, const char* weight, Int8Prefetch& ahead,
                                         Ints (&sums)[R][kInt8VecsAtOnce]) {
    dot_step<R, kInputs>(x, weight, ahead, sums);
  }

  struct Block {
    const char* codes;

    Block(const Weight& w, int64_t block) : codes(w.values.row<const char>(block)), factors_(w), block_(block) {}

    struct Step {
      Vec scales[kInt8VecsAtOnce], less[kInt8VecsAtOnce];  // less: -minimum

      Vec add(int v, Ints sums, const char* start, Vec row_scale, Vec total) const {
        total = fma(to_vec(sums) * row_scale, scales[v], total);
        if constexpr (kHasMinimums) total = fma(set(load_float(start)), less[v], total);
        return total;
      }
    };
    Step step(int64_t step, int half) const {
      Step of;
      for (int v = 0; v < kInt8VecsAtOnce; ++v) {
        const int64_t lanes = half * kInt8VecsAtOnce + v;
        of.scales[v] = factors_.scale(block_, step, lanes);
        if constexpr (kHasMinimums) of.less[v] = zero() - factors_.minimum(block_, step, lanes);
      }
      factors_.fetch_scales(block_, step + 8);
      return of;
    }

    Vec value(int, Vec total, float) const { return total; }

   private:
    const GgufFactors<kNibbles> factors_;
    const int64_t block_;
  };
};

template <class Codes, bool kHasMinimums>
struct GgufForm : GgufProducts<Codes::kInputs, kHasMinimums, Codes::kMinimums == Minimums::always> {  // 2 bits: nibbles
  using Base = typename GgufForm::Products;
  using Base::kInputs;
  static constexpr int64_t kStoredBytes = 2 * Codes::kTileBytes;
  static constexpr int kZero = kHasMinimums ? 1 : Codes::kZero;

  static Ints in_order(Ints codes) { return Codes::kNibbleOrder ? in_nibble_order(codes) : codes; }
  static constexpr int64_t place(int64_t i) { return Codes::kNibbleOrder ? nibble_place(i) : i; }
  static void pack(char* to, int64_t stride, int64_t step_bytes, const int8_t (&codes)[kInt8Rows][kInt8TileK],
                   int64_t rows, int64_t steps, char* starts) {
    pack_codes<GgufForm>(to, stride, step_bytes, codes, rows, steps, starts);
  }

#ifdef TR_AVX512
  // sums = a step of R rows x a block, whose codes are expanded in registers.
  template <int R>
  [[gnu::always_inline]] static void dot_stored(const char* x, const char* stored, Ints (&sums)[R][kInt8VecsAtOnce]) {
    constexpr int64_t kRuns = kInputs / 8, kRunBytes = Codes::kTileBytes / kRuns;
#pragma GCC unroll 2
    for (int v = 0; v < kInt8VecsAtOnce; ++v, stored += Codes::kTileBytes) {
#pragma GCC unroll 4
      for (int64_t run = 0; run < kRuns; ++run) {
        for (int64_t line = 0; line < kRunBytes; line += 64) {
          _mm_prefetch(stored + run * kRunBytes + line + Base::kAhead, _MM_HINT_T0);
        }
        Ints first, second;
        Codes::expand(stored, run, 0, first, second);
        const char* const quads = x + 2 * run * R * kQuadBytes;
        for_int8_rows<R>([&](int r) __attribute__((always_inline)) {
          sums[r][v] = add_dot(sums[r][v], first, load_word(quads + r * kQuadBytes));
          sums[r][v] = add_dot(sums[r][v], second, load_word(quads + (R + r) * kQuadBytes));
        });
      }
    }
  }
#endif

  static const char* expanded(const char* stored, int64_t steps, char* panel) {
    char* to = panel;
    for (int64_t half = 0; half < 2 * steps; ++half, stored += Codes::kTileBytes) {
      for (int64_t run = 0; run < kInputs / 8; ++run, to += 128) {
        for (int64_t output = 0; output < kHalfN; output += kLanes) {
          Ints first, second;
          Codes::expand(stored, run, output, first, second);
          store(to + output * 4, first);
          store(to + 64 + output * 4, second);
        }
      }
    }
    return panel;
  }
#ifdef TR_AMX
  static const char* tiles(const char* stored, int64_t steps, char* panel) { return expanded(stored, steps, panel); }
#endif
};

// The forms of weights without and with minimums.
template <class Codes>
struct GgufForms {
  using Weight = GgufWeight;
  using First = GgufForm<Codes, Codes::kMinimums == Minimums::always>;
  using Second = GgufForm<Codes, Codes::kMinimums != Minimums::never>;

  // Calls f with the form of the products of a weight.
  template <class F>
  static void with(const Weight& w, const F& f) {
    if constexpr (std::is_same_v<First, Second>) {
      f(First());
    } else {
      w.has_minimums() ? f(Second()) : f(First());
    }
  }
};

// The forms of weights of any codes. First and Second need the most memory of those with their number of inputs.
struct AllGgufForms {
  using Weight = GgufWeight;
  using First = GgufForms<GgufBytes6>::First;
  using Second = GgufForms<WholeBytes>::First;

  template <class F>
  static void with(const Weight& w, const F& f) {
    switch (w.tile_bytes()) {
      case GgufBytes2::kTileBytes:
        return GgufForms<GgufBytes2>::with(w, f);
      case GgufBytes3::kTileBytes:
        return GgufForms<GgufBytes3>::with(w, f);
      case GgufBytes5::kTileBytes:
        return GgufForms<GgufBytes5>::with(w, f);
      case GgufBytes6::kTileBytes:
        return GgufForms<GgufBytes6>::with(w, f);
      case WholeBytes::kTileBytes:
        return GgufForms<WholeBytes>::with(w, f);
      default:
        return w.has_table() ? GgufForms<Iq4Bytes>::with(w, f) : GgufForms<GgufBytes4>::with(w, f);
    }
  }
};

}  // namespace tilerank::TR_RUNG
