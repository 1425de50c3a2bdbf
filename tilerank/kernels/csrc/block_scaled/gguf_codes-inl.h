// The codes of the block formats of GGUF (gguf.h) as bytes, compiled once per rung (no include guard; include after
// gguf_scales-inl.h and nibbles-inl.h). Codes are expanded to unsigned bytes, [quads of inputs][16 outputs][4], the
// right operand of an AMX product.
//
// expand(half, run, output, first, second) reads the codes of a run of 8 inputs of kLanes outputs from half of a tile.
// kZero: the byte of the number 0 in a weight without minimums. kMinimums: which weights have some. kNibbleOrder: of
// every eight inputs `first` has 0, 4, 1 and 5, and `second` 2, 6, 3 and 7; else they are in order.

namespace tilerank::TR_RUNG {

enum class Minimums { never, some, always };

// Codes of 2 to 6 bits.
template <int kBits, Minimums kWhich>
struct PlaneBytes {
  using Planes = CodePlanes<kBits>;
  static constexpr int64_t kInputs = Planes::kInputs, kTileBytes = Planes::kBytes;
  static constexpr int kZero = 1 << (kBits - 1);
  static constexpr Minimums kMinimums = kWhich;
  static constexpr bool kNibbleOrder = true;

  static void expand(const char* half, int64_t run, int64_t output, Ints& first, Ints& second) {
    constexpr int kLow = Planes::kNibbles ? 4 : Planes::kPairs ? 2 : 0;  // bits below the topmost plane
    first = second = Ints{};
    if constexpr (Planes::kNibbles) {
      const Ints nibbles = load_ints(half + run * 64 + output * 4);
      first = both(nibbles, bytes(15));
      second = both(shift_down<4>(nibbles), bytes(15));
    }
    if constexpr (Planes::kPairs) {
      const Ints pairs = widen_halves(half + Planes::kPairsAt + run * 32 + output * 2);
      // The low bits of the bytes become those of inputs 0, 4, 1 and 5.
      const Ints spread = or_and(pairs, shift_left<14>(pairs), words(static_cast<int32_t>(0xffff0000)));
      constexpr int kTo = Planes::kNibbles ? 4 : 0;
      first = add(first, part<0, 3, kTo>(spread));
      second = add(second, part<4, 3, kTo>(spread));
    }
    if constexpr (Planes::kSingles) {
      const Ints singles = widen_bytes(half + Planes::kSinglesAt + run * 16 + output);
      const Ints near = or_and(singles, shift_left<4>(singles), words(0x0f00));
      const Ints spread = add(near, shift_left<15>(near));
      first = add(first, part<0, 1, kLow>(spread));
      second = add(second, part<2, 1, kLow>(spread));
    }
  }

 private:
  // The bits `kMask` at place kFrom of every byte, moved to place kTo.
  template <int kFrom, int kMask, int kTo>
  static Ints part(Ints x) {
    if constexpr (kFrom > kTo) return both(shift_down<kFrom - kTo>(x), bytes(kMask << kTo));
    return both(shift_left<kTo - kFrom>(x), bytes(kMask << kTo));
  }
};

// The codes of IQ4_NL and IQ4_XS.
struct Iq4Bytes : PlaneBytes<4, Minimums::never> {
  static constexpr int kZero = 128;

  static void expand(const char* half, int64_t run, int64_t output, Ints& first, Ints& second) {
    PlaneBytes::expand(half, run, output, first, second);
    first = differ(lookup_nibbles(kIq4Numbers, first), bytes(kZero));
    second = differ(lookup_nibbles(kIq4Numbers, second), bytes(kZero));
  }
};

// Codes of 8 bits.
struct WholeBytes {
  static constexpr int64_t kInputs = 32, kTileBytes = 512;
  static constexpr int kZero = 128;
  static constexpr Minimums kMinimums = Minimums::never;
  static constexpr bool kNibbleOrder = false;

  static void expand(const char* half, int64_t run, int64_t output, Ints& first, Ints& second) {
    // Of 16 bytes, the first 8 are inputs 0 and 1 of four outputs, the others inputs 2 and 3.
    alignas(16) static constexpr int8_t kOrder[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
    const char* const line = half + run * 128 + output * 4;
    first = differ(shuffle_bytes(load_ints(line), kOrder), bytes(kZero));
    second = differ(shuffle_bytes(load_ints(line + 64), kOrder), bytes(kZero));
  }
};

using GgufBytes2 = PlaneBytes<2, Minimums::always>;
using GgufBytes3 = PlaneBytes<3, Minimums::never>;
using GgufBytes4 = PlaneBytes<4, Minimums::some>;
using GgufBytes5 = PlaneBytes<5, Minimums::some>;
using GgufBytes6 = PlaneBytes<6, Minimums::never>;

}  // namespace tilerank::TR_RUNG
