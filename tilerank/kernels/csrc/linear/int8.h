// The memory layout of an int8 weight[n, k], the same for every compiled rung: codes in blocks of 32 outputs, each
// stored sequentially over k, and one fp32 scale per output; weight = code * scale. Codes are stored as code + 128,
// because the dot products of AVX-512 and AMX multiply unsigned with signed bytes. Both sizes are padded with zeros:
// what they stand for is multiplied with a scale of zero or with activations of zero.
//
//   codes:  u8 [n / 32][k / 64][2 tiles][16 quads of k][16 outputs][4]   a tile is the right operand of an AMX product
//   scales: f32 [n / 32][32]
#pragma once
#include "linear/pack.h"

namespace tilerank {

constexpr int64_t kInt8TileK = 64;        // inputs of a tile
constexpr int64_t kInt8BlockStep = 2048;  // bytes of a block for the inputs of a tile
constexpr int kInt8Zero = 128;            // what is stored for code 0

struct Int8Weight {
  static constexpr const char* kFields = "codes scales";
  Tensor codes, scales;

  Int8Weight from(int64_t block) const { return {codes.from(block), scales.from(block)}; }
};

}  // namespace tilerank
