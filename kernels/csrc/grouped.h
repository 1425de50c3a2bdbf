// Weights of a few bits with a scale for every group of inputs, the same for every compiled rung. As other weights
// (pack.h) they lie in blocks of 32 outputs, each one sequential stream over k of tiles of 32 inputs in two halves of
// 16 outputs, so that a product with few rows reads memory in order; values and scales apart:
//
//   values u8 [n / 32][groups][tiles of 32 inputs of a group][2][bytes of a tile of 16 outputs]
//     int4: [4 lines][32 words][4 nibbles]     nibble j of word w of line l: output w / 2, input 8 l + 2 j + w % 2; the
//                                              code less 8 as a signed number, so that memory of zeros stands for 0
//     fp8:  [8 lines][4][2 pairs][8 bytes]     byte b of pair p of part q of line l: output 4 q + b / 2, input
//                                              4 l + 2 p + b % 2, in the order that interleaving two registers wants
//   scales
//     int4: f16 [n / 32][groups][32 outputs], times 2^8: what checkpoints bring as f16 or bf16 stays exact
//     fp8:  f32 [n / 32][groups]
//   zeros, int4 only, or none: i8 [n / 32][groups][32 outputs], the code that stands for 0, less 8; without, 8 is it
//
// An output is the sum over groups of scale * (products of x with the values, minus the zero times the sum of x).
// Values are exact in bf16, so only the sums are rounded, in fp32.
#pragma once
#include "kernel.h"
#include "pack.h"

namespace tilerank {

constexpr int64_t kHalfN = 16;  // outputs of a tile
constexpr float kInt4ScaleUnit = 1.0f / 256;

// What int4 nibbles stand for, as the bits of bf16: 0 to 7, -8 to -1.
alignas(32) inline constexpr uint16_t kInt4Values[16] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
                                                         0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0,
                                                         0xc080, 0xc040, 0xc000, 0xbf80};

// Their low and their high bytes, four times.
struct Int4Bytes {
  alignas(64) uint8_t low[64], high[64];

  constexpr Int4Bytes() : low(), high() {
    for (int i = 0; i < 64; ++i) {
      low[i] = static_cast<uint8_t>(kInt4Values[i % 16]);
      high[i] = static_cast<uint8_t>(kInt4Values[i % 16] >> 8);
    }
  }
};
inline constexpr Int4Bytes kInt4Bytes;

// The bf16 that an fp8 code without its sign stands for: its low and its high byte.
struct Fp8Values {
  alignas(64) uint8_t low[128], high[128];

  constexpr Fp8Values() : low(), high() {
    for (int code = 0; code < 128; ++code) {
      const int exponent = code >> 3, mantissa = code & 7;
      int value = (exponent + 120) << 7 | mantissa << 4;
      if (exponent == 0) {  // mantissa * 2^-9, subnormal only in fp8
        const int shift = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;
        value = mantissa == 0 ? 0 : (118 + shift) << 7 | ((mantissa << (7 - shift)) & 0x7f);
      }
      if (code == 127) value = 0x7fc0;
      low[code] = static_cast<uint8_t>(value);
      high[code] = static_cast<uint8_t>(value >> 8);
    }
  }
};
inline constexpr Fp8Values kFp8Values;

}  // namespace tilerank
