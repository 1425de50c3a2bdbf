// The block formats of GGUF (gguf.h) for the micro-kernels of block_scaled_rows-inl.h, compiled once per rung (no
// include guard; include after block_scaled_formats-inl.h and gguf_scales-inl.h).

namespace tilerank::TR_RUNG {

// Two vectors of numbers that are exact in bf16 as the weights of a pair of inputs.
static inline Pair pair_of(Vec even, Vec odd) {
#ifdef TR_BF16
  return {upper_words(bits_of(even), bits_of(odd))};
#else
  return {even, odd};
#endif
}

// kMiddle: the code that stands for 0 if there are no minimums. kNibbles: as in GgufFactors.
template <int kMiddle, bool kNibbles>
struct GgufScales : PackedValues, GgufFactors<kNibbles> {
  using Weight = GgufWeight;
  static constexpr bool kMayHaveZeros = kMiddle != 0, kMayHaveMinimums = true;

  explicit GgufScales(const Weight& w) : PackedValues(w.values), GgufFactors<kNibbles>(w) {}

  bool has_zeros() const { return kMiddle != 0 && !this->has_minimums(); }
  Vec negative_zero(int64_t, int64_t, int64_t) const { return set(-kMiddle); }
};

// Codes of 2, 3, 5 and 6 bits.
template <int kBits, class Scales>
struct PlaneCodes : Scales {
  using Planes = CodePlanes<kBits>;
  static constexpr int64_t kTileInputs = Planes::kInputs;
  static constexpr int64_t kPackedTile = Planes::kBytes;
  static constexpr int kExponent = 0;
  static constexpr bool kWaitsForMemory = false;
  static constexpr int kMostRows = kLanes == 16 ? 14 : 3;
  static constexpr int64_t kFewRows = kLanes == 16 ? 2 * kMostRows : kMostRows;

  using Scales::Scales;

  struct Line {
    static constexpr int kInputs = 8;
    Ints nibbles, pairs, singles;

    // half: a tile; outputs from `output` on, the inputs of run `i`.
    Line(const char* half, int64_t i, int64_t output) {
      if constexpr (Planes::kNibbles) nibbles = load_ints(half + i * 64 + output * 4);
      if constexpr (Planes::kPairs) pairs = widen_halves(half + Planes::kPairsAt + i * 32 + output * 2);
      if constexpr (Planes::kSingles) singles = widen_bytes(half + Planes::kSinglesAt + i * 16 + output);
    }

    template <int P>
    Pair pair() const {
      return pair_of(number<2 * P>(), number<2 * P + 1>());
    }

   private:
    template <int kInput>
    Vec number() const {
      constexpr int kLow = Planes::kNibbles ? 4 : Planes::kPairs ? 2 : 0;  // bits below the topmost plane
      Ints code;
      if constexpr (Planes::kNibbles) {
        code = both(shift_down<nibble_shift(kInput)>(nibbles), words(15));
        if constexpr (Planes::kPairs) code = add(code, part<2 * kInput, 3, 4>(pairs));
      } else {
        code = part<2 * kInput, 3, 0>(pairs);
      }
      if constexpr (Planes::kSingles) code = add(code, part<kInput, 1, kLow>(singles));
      return to_vec(code);
    }

    // The bits `kMask` at place kFrom of x, moved to place kTo.
    template <int kFrom, int kMask, int kTo>
    static Ints part(Ints x) {
      if constexpr (kFrom > kTo) return both(shift_down<kFrom - kTo>(x), words(kMask << kTo));
      return both(shift_left<kTo - kFrom>(x), words(kMask << kTo));
    }
  };
};

// Codes from 0 to 15.
struct Uint4Codes {
  static constexpr int kExponent = 0;
#if defined(TR_BF16)
  alignas(32) static constexpr uint16_t kValues[16] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                                       0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
#elif defined(TR_AVX512)
  alignas(64) static constexpr float kValues[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
  template <int P>
  static Pair pair(Ints codes) {
    return {value(shift_left<28 - 4 * P>(codes)), value(shift_left<12 - 4 * P>(codes))};
  }

 private:
  static Vec value(Ints topmost) { return to_vec(shift_down<28>(topmost)); }
#endif
};

// The codes of IQ4_NL and IQ4_XS.
struct Iq4Codes {
  static constexpr int kExponent = 0;
#if defined(TR_BF16)
  alignas(32) static constexpr uint16_t kValues[16] = {0xc2fe, 0xc2d0, 0xc2a6, 0xc282, 0xc244, 0xc20c, 0xc1b0, 0xc120,
                                                       0x3f80, 0x4150, 0x41c8, 0x4218, 0x4254, 0x428a, 0x42b2, 0x42e2};
#elif defined(TR_AVX512)
  alignas(64) static constexpr float kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                    1,    13,   25,  38,  53,  69,  89,  113};
#else
  template <int P>
  static Pair pair(Ints codes) {
    return pair_in_table<P>(kIq4Numbers, codes);
  }
#endif
};

using GgufU2 = PlaneCodes<2, GgufScales<0, true>>;
using GgufU3 = PlaneCodes<3, GgufScales<4, false>>;
using GgufU4 = NibbleCodes<Uint4Codes, GgufScales<8, false>>;
using GgufIq4 = NibbleCodes<Iq4Codes, GgufScales<0, false>>;
using GgufU5 = PlaneCodes<5, GgufScales<16, false>>;
using GgufU6 = PlaneCodes<6, GgufScales<32, false>>;
using GgufS8 = ByteCodes<Int8Codes, GgufScales<0, false>>;

}  // namespace tilerank::TR_RUNG
