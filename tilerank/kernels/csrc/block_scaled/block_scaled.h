// The memory layout of block-scaled weights (int4, mxfp4, nvfp4, fp8, int8), the same for every compiled rung. A
// K-block is a run of inputs that share a scale. As in pack.h, a weight consists of blocks of 32 outputs, each stored
// sequentially over k as tiles of 32 inputs in two halves of 16 outputs. Values and scales are separate arrays:
//
//   values: u8 [n / 32][K-blocks][tiles of 32 inputs of a K-block][2][bytes of a tile of 16 outputs]
//     int4: [4 lines][32 words][4 nibbles]   nibble j of word w of line l: output w / 2, input 8 l + 2 j + w % 2, as
//                                            code - 8 in two's complement, so that zeroed memory stands for 0
//     mxfp4: the same with the codes of E2M1: a sign above 0, 0.5, 1, 1.5, 2, 3, 4 and 6
//     nvfp4: the same in tiles of 16 inputs: [2 lines][32 words][4 nibbles]
//     fp8, int8: [8 lines][4][2 pairs][8 bytes]   byte b of pair p of part q of line l: output 4 q + b / 2, input
//                                            4 l + 2 p + b % 2, the order that interleaving two registers restores
//   scales:
//     int4, group int8: f16 [n / 32][K-blocks][32 outputs], times 2^8: represents f16 and bf16 scales of checkpoints
//                       exactly
//     channel fp8: f32 [n / 32][1][32 outputs]; one scale may stand for all K-blocks in the two formats above, too
//     mxfp4: u8 [n / 32][K-blocks][32 outputs], exponents (E8M0): e means 2^(e - 127), 255 NaN
//     nvfp4: u8 [n / 32][K-blocks][32 outputs], magnitudes of e4m3 without NaN
//     fp8, block int8: f32 [n / 32][K-blocks]
//   zeros (int4 and group int8, optional): i8, as the scales: the value that stands for 0; default: 0
//   factors (nvfp4): f32 [n / 32][32 outputs], by which the scales of an output are multiplied
//
// output = sum over K-blocks of scale * (sum(x * value) - zero * sum(x)). Values are exact in bf16, so only the sums
// are rounded, in fp32.
#pragma once
#include "core/entry.h"
#include "linear/pack.h"

namespace tilerank {

constexpr int64_t kHalfN = 16;  // outputs of a tile
constexpr float kGroupScaleUnit = 1.0f / 256;

// The values of int4 nibbles as bf16 bits: 0 to 7, then -8 to -1.
alignas(32) inline constexpr uint16_t kInt4Values[16] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
                                                         0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0,
                                                         0xc080, 0xc040, 0xc000, 0xbf80};

// The values of E2M1 as bf16 bits, and twice these values, which are integers.
alignas(32) inline constexpr uint16_t kE2m1Values[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
                                                         0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0,
                                                         0xc000, 0xc040, 0xc080, 0xc0c0};
alignas(16) inline constexpr int8_t kE2m1Doubles[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// The bits of the bf16 value of an fp8 code without its sign.
constexpr int fp8_value(int code) {
  if (code == 0) return 0;
  if (code == 127) return 0x7fc0;
  const int exponent = code >> 3, mantissa = code & 7;
  if (exponent != 0) return (exponent + 120) << 7 | mantissa << 4;
  const int shift = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;  // mantissa * 2^-9: subnormal in fp8, normal in bf16
  return (118 + shift) << 7 | ((mantissa << (7 - shift)) & 0x7f);
}

// The bits of the bf16 value of a magnitude of int8. 128 has the place of 0.
constexpr int int8_value(int place) {
  int mantissa = place == 0 ? 128 : place, exponent = 134;  // of 128 to 255
  for (; mantissa < 128; --exponent) mantissa *= 2;
  return exponent << 7 | (mantissa & 0x7f);
}

constexpr int int4_value(int code) { return kInt4Values[code % 16]; }
constexpr int e2m1_value(int code) { return kE2m1Values[code % 16]; }

// The low and the high byte of the value of every code.
template <int kCodes>
struct ValueBytes {
  alignas(64) uint8_t low[kCodes] = {}, high[kCodes] = {};

  constexpr explicit ValueBytes(int (*value)(int)) {
    for (int code = 0; code < kCodes; ++code) {
      low[code] = static_cast<uint8_t>(value(code));
      high[code] = static_cast<uint8_t>(value(code) >> 8);
    }
  }
};
// The tables of 16 codes, four times.
inline constexpr ValueBytes<64> kInt4Bytes{int4_value}, kE2m1Bytes{e2m1_value};
inline constexpr ValueBytes<128> kFp8Values{fp8_value}, kInt8Values{int8_value};

// A scale for each output and each K-block, or one for all K-blocks. Formats without zero points have no `zeros`.
struct OutputScaledWeight {
  static constexpr const char* kFields = "values scales zeros";
  Tensor values, scales, zeros;

  OutputScaledWeight from(int64_t block) const { return {values.from(block), scales.from(block), zeros.from(block)}; }
};

// A scale for each output and each K-block, times a factor of the output.
struct FactoredWeight {
  static constexpr const char* kFields = "values scales factors";
  Tensor values, scales, factors;

  FactoredWeight from(int64_t block) const { return {values.from(block), scales.from(block), factors.from(block)}; }
};

// A scale for each block of outputs and each K-block.
struct ByteCodesWeight {
  static constexpr const char* kFields = "values scales";
  Tensor values, scales;

  ByteCodesWeight from(int64_t block) const { return {values.from(block), scales.from(block)}; }
};

}  // namespace tilerank
