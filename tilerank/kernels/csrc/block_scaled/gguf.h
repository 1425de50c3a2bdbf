// The memory layout of weights in the block formats of GGUF files, the same for every compiled rung.
//
//   values: u8 [n / 32][groups][1][2][bytes of a tile of 16 outputs x one group of inputs]; i8 if codes stand for the
//           numbers of kIq4Numbers
//     4 bits and 8 bits, in groups of 32: as int4 and int8 of block_scaled.h; nibbles are codes from 0 to 15
//     5 bits, in groups of 32: the tile of the lower 4 bits, then a byte for each output and 8 inputs: bit i of input i
//     6 bits, in groups of 16: the same with two bytes, 2 bits for each input
//     2 and 3 bits, in groups of 16: two bytes for each output and 8 inputs, 2 bits for each input; then, of 3 bits, a
//                                  byte of the third bits
//     Runs of 8 inputs follow one another: nibbles [runs][16][4 bytes], others [runs][16][2 or 1 bytes].
//   scales: f16 [n / 32][blocks][1 or 2][32 outputs]: the scales, and the minimums of formats that have some
//   subscales: i8 [n / 32][first + groups][1 or 2][32 outputs]: the factors of both for each group; absent if a block
//              is a group. With codes of 2 bits, both are in one byte, the subscale in the low nibble. The columns of a
//              rank may begin inside of a block: `first` groups of it are before them. Their factors take no memory;
//              those of the 32 outputs before end where they would be
//
// value = scale * subscale * (code - middle) + minimum * subminimum, where middle is half of the codes if there are no
// minimums, else 0. Codes of IQ4 stand for the numbers of a table instead.
#pragma once
#include "block_scaled/block_scaled.h"

namespace tilerank {

struct GgufWeight {
  static constexpr const char* kFields = "values scales subscales";
  Tensor values, scales, subscales;

  GgufWeight from(int64_t block) const { return {values.from(block), scales.from(block), subscales.from(block)}; }

  bool has_minimums() const { return scales.size[2] == 2; }
  int64_t tile_bytes() const { return values.size[4]; }
  bool has_table() const { return values.dtype == DType::i8; }
  // Groups of the first block before those of the weight.
  int64_t first() const { return subscales ? subscales.size[1] - values.size[1] : 0; }
  // Groups of a block are 2^shift: group g belongs to block (first + g) >> shift.
  int shift() const {
    int found = 0;
    while (blocks(first() + values.size[1], int64_t{1} << found) > scales.size[1]) ++found;
    return found;
  }
};

// What the codes of IQ4_NL and IQ4_XS stand for.
alignas(16) inline constexpr int8_t kIq4Numbers[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                       1,    13,   25,  38,  53,  69,  89,  113};

// The planes of codes of `kBits`: nibbles, pairs of bits and single bits.
template <int kBits>
struct CodePlanes {
  static constexpr bool kNibbles = kBits >= 4, kPairs = kBits == 2 || kBits == 3 || kBits == 6;
  static constexpr bool kSingles = kBits == 3 || kBits == 5;
  static constexpr int64_t kInputs = kBits == 4 || kBits == 5 ? 32 : 16;  // of a group
  static constexpr int64_t kRuns = kInputs / 8;
  static constexpr int64_t kPairsAt = kNibbles ? kRuns * 64 : 0;
  static constexpr int64_t kSinglesAt = kPairsAt + (kPairs ? kRuns * 32 : 0);
  static constexpr int64_t kBytes = kSinglesAt + (kSingles ? kRuns * 16 : 0);
};

// The place of input i of a run among the nibbles of its word, which are in the order of NibbleCodes.
constexpr int nibble_shift(int input) { return input % 2 * 16 + input / 2 * 4; }

}  // namespace tilerank
