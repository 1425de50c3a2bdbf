// The memory layout of an int8 weight[n, k], the same for every compiled rung: codes in blocks of 32 outputs, each
// stored sequentially over k, and one fp32 scale per output; weight = code * scale. Both sizes are padded with zeros.
// The sum of each output's codes serves the rungs whose dot product takes unsigned bytes on one side.
//
//   codes:  [n / 32][k / 64][2 tiles][16 quads of k][16 outputs][4]   a tile is the right operand of one AMX product
//   scales: [n / 32][32]
//   sums:   [n / 32][32] int32
#pragma once
#include "linear/pack.h"

namespace tilerank {

constexpr int64_t kInt8TileK = 64;        // inputs of a tile
constexpr int64_t kInt8BlockStep = 2048;  // bytes of a block for the inputs of a tile

// Bytes of the codes of a row of k activations, padded to whole tiles.
constexpr int64_t int8_row_bytes(int64_t k) { return blocks(k, kInt8TileK) * kInt8TileK; }

struct Int8Weight {
  static constexpr const char* kFields = "codes scales sums";
  Tensor codes, scales, sums;

  Int8Weight from(int64_t block) const { return {codes.from(block), scales.from(block), sums.from(block)}; }
};

}  // namespace tilerank
