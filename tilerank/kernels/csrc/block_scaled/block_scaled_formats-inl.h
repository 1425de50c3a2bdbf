// The block-scaled formats (block_scaled.h), compiled once per rung (no include guard). A format locates tiles, expands
// their values into registers and returns scales and negated zero points.
//
// With AMX, expand() writes a tile as bf16 in the layout of pack.h. If `ahead` is given, it prefetches one line of it
// before each line that it reads.
//
// kTileInputs: the inputs of a tile. kMayHaveMinimums: a K-block may add minimum() times the sum of its inputs.
//
// In vectors, a Line is the values of some inputs for kLanes outputs, usually of 64 bytes for all outputs of a tile.
// Line(half, i, output) reads it from half of a tile. pair<P>() returns its inputs 2 P and 2 P + 1, scaled by
// 2^-kExponent. kWaitsForMemory: with few rows, multiplying a line is faster than reading it. kMostRows: the most rows
// of a panel, whose sums fill the registers that expanding leaves free. kFewRows: up to this number of rows,
// BlockScaledRows reads a whole block of the weight per panel.

namespace tilerank::TR_RUNG {

struct PackedValues {
  const char* const values;
  const int64_t k_blocks, k_block_tiles, tile_bytes;

  explicit PackedValues(const Tensor& tensor)
      : values(tensor.as<const char>()),
        k_blocks(tensor.size[1]),
        k_block_tiles(tensor.size[2]),
        tile_bytes(tensor.size[4]) {}

  // Returns the first half of a tile; the second half follows it.
  const char* tile(int64_t block, int64_t tile) const {
    return values + (block * k_blocks * k_block_tiles + tile) * 2 * tile_bytes;
  }
};

// A scale for each block of outputs and each K-block.
struct BlockScales : PackedValues {
  using Weight = ByteCodesWeight;
  static constexpr bool kMayHaveZeros = false, kMayHaveMinimums = false;
  const float* const scales;

  explicit BlockScales(const Weight& w) : PackedValues(w.values), scales(w.scales.as<const float>()) {}

  Vec scale(int64_t block, int64_t k_block, int64_t) const { return set(scales[block * k_blocks + k_block]); }
  bool has_zeros() const { return false; }
  Vec negative_zero(int64_t, int64_t, int64_t) const { return zero(); }
  void fetch_scales(int64_t, int64_t) const {}  // few enough to stay in the cache
};

static inline Vec load_scale(const f16* at) { return load(at) * set(kGroupScaleUnit); }
static inline Vec load_scale(const float* at) { return load(at); }
static inline Vec load_scale(const uint8_t* at) { return powers_of_two(at); }

// A scale for each output and each K-block, or one for all K-blocks.
template <class Scale, bool kZeros>
struct OutputScales : PackedValues {
  using Weight = OutputScaledWeight;
  static constexpr bool kMayHaveZeros = kZeros, kMayHaveMinimums = false;
  const int64_t scale_blocks;
  const Scale* const scales;
  const int8_t* const zeros;

  explicit OutputScales(const Weight& w)
      : PackedValues(w.values),
        scale_blocks(w.scales.size[1]),
        scales(w.scales.as<const Scale>()),
        zeros(kZeros ? w.zeros.as<const int8_t>() : nullptr) {}

  // The scales of outputs v * kLanes to v * kLanes + kLanes - 1 of a block.
  Vec scale(int64_t block, int64_t k_block, int64_t v) const {
    return load_scale(scales + place(block, k_block) + v * kLanes);
  }

  bool has_zeros() const { return zeros != nullptr; }
  Vec negative_zero(int64_t block, int64_t k_block, int64_t v) const {
    return zero() - load(zeros + place(block, k_block) + v * kLanes);
  }

  // Prefetches what scale() and negative_zero() read.
  void fetch_scales(int64_t block, int64_t k_block) const {
    _mm_prefetch(reinterpret_cast<const char*>(scales + place(block, k_block)), _MM_HINT_T1);
    if (zeros) _mm_prefetch(reinterpret_cast<const char*>(zeros + place(block, k_block)), _MM_HINT_T1);
  }

 private:
  int64_t place(int64_t block, int64_t k_block) const {
    return (block * scale_blocks + (scale_blocks == 1 ? 0 : k_block)) * kBlockN;
  }
};

// Two codes in a byte. Codes says what they stand for. kGroup: inputs of a tile; expand() takes tiles of 32.
template <class Codes, class Scales, int64_t kGroup = kTileK>
struct NibbleCodes : Scales {
  static constexpr int64_t kTileInputs = kGroup, kPackedTile = kGroup * kHalfN / 2;
  static constexpr int kExponent = Codes::kExponent;
  static constexpr bool kWaitsForMemory = false;
  static constexpr int kMostRows = kLanes == 16 ? 14 : 3;
  static constexpr int64_t kFewRows = kLanes == 16 ? 2 * kMostRows : kMostRows;

  using Scales::Scales;

#ifdef TR_AMX
  // Inlined, because with few rows it runs between any two products.
  [[gnu::always_inline]] static inline void expand(const char* from, bf16* to, const char* ahead = nullptr) {
    // The low and the high byte of each value come from separate byte tables. A lookup of bytes (vpermb) occupies one
    // vector port and serves twice as many codes as a lookup of words, which occupies two. Only the low six bits of an
    // index count, so the table is repeated four times and the bits above a nibble need no mask.
    const Ints low_bytes = load_ints(Codes::kBytes.low), high_bytes = load_ints(Codes::kBytes.high);
    const Ints even = halves(0x00ff);
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line, to += 4 * 32) {
      const Ints codes = load_in_turn(from + line * 64, ahead ? ahead + line * 64 : nullptr);
      for (int nibble = 0; nibble < 2; ++nibble) {  // of every byte: nibbles 0 and 2 of a word, then 1 and 3
        const Ints index = nibble ? shift_halves_down<4>(codes) : codes;
        const Ints low = lookup_bytes(low_bytes, index), high = lookup_bytes(high_bytes, index);
        store(to + nibble * 32, choose(even, low, shift_halves_left<8>(high)));
        store(to + (nibble + 2) * 32, choose(even, shift_halves_down<8>(low), high));
      }
    }
  }
#else
  // The 32 bits of a lane are the codes of eight inputs of its output: the even ones, then the odd ones.
  struct Line {
    static constexpr int kInputs = 8;
    Ints codes;

    explicit Line(const char* at) : codes(load_ints(at)) {}
    Line(const char* half, int64_t i, int64_t output) : Line(half + i * 64 + output * 4) {}

    template <int P>
    Pair pair() const {
#ifdef TR_BF16
      return {lookup_halves(Codes::kValues, shift_halves_down<4 * P>(codes))};
#elif defined(TR_AVX512)  // only the low four bits of an index count
      const Vec values = load(Codes::kValues);
      return {lookup(values, shift_down<4 * P>(codes)), lookup(values, shift_down<16 + 4 * P>(codes))};
#else
      return Codes::template pair<P>(codes);
#endif
    }
  };
#endif
};

// Codes in two's complement.
struct Int4Codes {
  static constexpr int kExponent = 0;
#ifdef TR_AMX
  static constexpr const auto& kBytes = kInt4Bytes;
#elif defined(TR_BF16)
  static constexpr const uint16_t* kValues = kInt4Values;
#elif defined(TR_AVX512)
  alignas(64) static constexpr float kValues[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
#else
  template <int P>
  static Pair pair(Ints codes) {
    return {value(shift_left<28 - 4 * P>(codes)), value(shift_left<12 - 4 * P>(codes))};
  }

 private:
  static Vec value(Ints topmost) { return to_vec(shift_right<28>(topmost)); }
#endif
};

#ifdef TR_AVX2
// The numbers of `table` for inputs 2 P and 2 P + 1 of eight codes.
template <int P>
static inline Pair pair_in_table(const int8_t* table, Ints codes) {
  const Ints nibbles = both(P % 2 ? shift_halves_down<4>(codes) : codes, bytes(15));
  const Ints numbers = lookup_nibbles(table, nibbles);
  constexpr int kByte = P / 2;
  return {to_vec(shift_right<24>(shift_left<24 - 8 * kByte>(numbers))),
          to_vec(shift_right<24>(shift_left<8 - 8 * kByte>(numbers)))};
}
#endif

// Codes of E2M1.
struct E2m1Codes {
#ifdef TR_AMX
  static constexpr int kExponent = 0;
  static constexpr const auto& kBytes = kE2m1Bytes;
#elif defined(TR_BF16)
  static constexpr int kExponent = 0;
  static constexpr const uint16_t* kValues = kE2m1Values;
#elif defined(TR_AVX512)
  static constexpr int kExponent = 0;
  alignas(64) static constexpr float kValues[16] = {0,     0.5f,  1,  1.5f,  2,  3,  4,  6,
                                                    -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
#else
  static constexpr int kExponent = -1;  // pair() returns doubles of values

  template <int P>
  static Pair pair(Ints codes) {
    return pair_in_table<P>(kE2m1Doubles, codes);
  }
#endif
};

// Whether a line expands to pairs of bf16 in fewer instructions than to fp32.
template <class Line>
concept ExpandsToBf16 = requires(const Line& line) { line.template bf16_pairs<0>(); };

// A byte for each code. Codes expands codes.
template <class Codes, class Scales>
struct ByteCodes : Scales {
  static constexpr int64_t kTileInputs = kTileK, kPackedTile = 512;
  static constexpr int kExponent = Codes::kExponent;
#ifdef TR_BF16
  static constexpr bool kWaitsForMemory = true;
  static constexpr int kMostRows = 13;
  static constexpr int64_t kFewRows = 2 * kMostRows;
#else
  static constexpr bool kWaitsForMemory = false;
  static constexpr int kMostRows = ExpandsToBf16<typename Codes::Line> ? kPanelRows : kWholeBlockRows;
  static constexpr int64_t kFewRows = kLanes == 16 ? 8 : ExpandsToBf16<typename Codes::Line> ? 1 : 3;
#endif

  using Scales::Scales;

#ifdef TR_AMX
  [[gnu::always_inline]] static inline void expand(const char* from, bf16* to, const char* ahead = nullptr) {
    const Codes table;
#pragma GCC unroll 8
    for (int line = 0; line < 8; ++line, to += 2 * 32) {
      const BytesOfBf16 values = table(load_in_turn(from + line * 64, ahead ? ahead + line * 64 : nullptr));
      store(to, values.lower());
      store(to + 32, values.upper());
    }
  }
#elif defined(TR_BF16)
  struct Line {
    static constexpr int kInputs = 4;
    BytesOfBf16 values;

    explicit Line(const char* at) : values(Codes()(load_ints(at))) {}
    Line(const char* half, int64_t i, int64_t output) : Line(half + i * 64 + output * 4) {}

    template <int P>
    Pair pair() const {
      return {P == 0 ? values.lower() : values.upper()};
    }
  };
#else
  using Line = typename Codes::Line;
#endif
};

#ifdef TR_BF16

struct Fp8Codes {
  static constexpr int kExponent = 0;
  const ByteTable low{kFp8Values.low}, high{kFp8Values.high};

  BytesOfBf16 operator()(Ints codes) const { return {low[codes], or_and(high[codes], codes, bytes(0x80))}; }
};

// Codes from -128 to 127, which are exact in bf16.
struct Int8Codes {
  static constexpr int kExponent = 0;
  const ByteTable low{kInt8Values.low}, high{kInt8Values.high};

  BytesOfBf16 operator()(Ints codes) const {
    const Ints magnitudes = abs_bytes(codes);  // only the low seven bits count, so that of -128 is 0
    return {low[magnitudes], or_and(high.where(codes, magnitudes), codes, bytes(0x80))};
  }
};

#else

// Codes that expand to halves first.
template <class Codes>
struct HalvesLine {
  static constexpr int kInputs = 4;
  Ints even, odd;  // halves: inputs 0 of all outputs, then inputs 2; inputs 1, then 3

  explicit HalvesLine(const char* at) {
    const Ints codes = even_parts_first(load_ints(at));
    even = Codes::halves_of(shift_halves_left<8>(codes));
    odd = Codes::halves_of(codes);
  }
  HalvesLine(const char* half, int64_t i, int64_t output) : HalvesLine(half + i * 64 + output * 4) {}

  template <int P>
  Pair pair() const {
    return {Codes::floats(half_of<P>(even)), Codes::floats(half_of<P>(odd))};
  }
};

#ifdef TR_AVX512

// As f16, the bits of a code mean 2^-8 of its value, subnormals included.
struct Fp8Codes {
  using Line = HalvesLine<Fp8Codes>;
  static constexpr int kExponent = 8;

  // Returns the f16 of the code in the upper byte of each half. Only the code of NaN carries into the topmost exponent
  // bit, which makes it an f16 NaN.
  static Ints halves_of(Ints codes) {
    const Ints bits = both(shift_halves_right<1>(codes), halves(0xbf80));
    return or_and(bits, add_halves(bits, halves(0x80)), halves(0x4000));
  }
  template <class Half>
  static Vec floats(Half x) {
    return floats_of_f16(x);
  }
};

#else

// Tables by four bits of an fp8 code that expand it to bf16, once for each half of a vector. A code of magnitude m is
// 0x3c00 + 16 m, with its sign, unless it is subnormal or NaN. high: the upper byte, by the upper bits of the code;
// the others: what changes in a byte if the code is subnormal, by the lower bits of the code.
struct Fp8Tables {
  alignas(32) uint8_t high[32] = {}, subnormal_high[32] = {}, subnormal_low[32] = {};

  constexpr Fp8Tables() {
    for (int i = 0; i < 32; ++i) {
      const int bits = i % 16, value = fp8_value(bits);
      high[i] = static_cast<uint8_t>(bits / 8 << 7 | (0x3c + bits % 8));
      subnormal_high[i] = static_cast<uint8_t>(value >> 8 ^ 0x3c);
      subnormal_low[i] = static_cast<uint8_t>(value ^ bits << 4);
    }
  }
};

// Conversions from f16 would take longer than the products of a few rows.
struct Fp8Codes {
  static constexpr int kExponent = 0;

  struct Line {
    static constexpr int kInputs = 4;
    Ints low, high;  // bytes of bf16; interleaved, they form pairs of inputs

    explicit Line(const char* at) {
      static constexpr Fp8Tables kTables;
      const Ints codes = load_ints(at), magnitudes = both(codes, bytes(0x7f));
      const Ints upper = both(shift_halves_down<4>(codes), bytes(0x0f));
      const Ints lower = _mm256_add_epi8(magnitudes, bytes(0x70));  // from 16 on, the top bit is set, which looks up 0
      low = _mm256_xor_si256(both(shift_halves_left<4>(codes), bytes(0xf0)), lookup(kTables.subnormal_low, lower));
      high = _mm256_xor_si256(lookup(kTables.high, upper), lookup(kTables.subnormal_high, lower));
      high = _mm256_or_si256(high, _mm256_cmpeq_epi8(magnitudes, bytes(0x7f)));  // NaN
    }
    Line(const char* half, int64_t i, int64_t output) : Line(half + i * 64 + output * 4) {}

    template <int P>
    Ints bf16_pairs() const {
      return P == 0 ? _mm256_unpacklo_epi8(low, high) : _mm256_unpackhi_epi8(low, high);
    }
    template <int P>
    Pair pair() const {
      const Ints pairs = bf16_pairs<P>();
      return {vec_of(shift_left<16>(pairs)), vec_of(both(pairs, words(static_cast<int32_t>(0xffff0000))))};
    }

   private:
    static Ints lookup(const uint8_t (&table)[32], Ints indices) {
      return _mm256_shuffle_epi8(load_ints(table), indices);
    }
  };
};

#endif

// Codes from -128 to 127.
struct Int8Codes {
  using Line = HalvesLine<Int8Codes>;
  static constexpr int kExponent = 0;

  static Ints halves_of(Ints codes) { return shift_halves_right<8>(codes); }
  template <class Half>
  static Vec floats(Half x) {
    return floats_of_int16(x);
  }
};

#endif

using Int4 = NibbleCodes<Int4Codes, OutputScales<f16, true>>;
using Mxfp4 = NibbleCodes<E2m1Codes, OutputScales<uint8_t, false>>;
using Fp8 = ByteCodes<Fp8Codes, BlockScales>;
using BlockInt8 = ByteCodes<Int8Codes, BlockScales>;
using ChannelFp8 = ByteCodes<Fp8Codes, OutputScales<float, false>>;
using GroupInt8 = ByteCodes<Int8Codes, OutputScales<f16, true>>;

}  // namespace tilerank::TR_RUNG
