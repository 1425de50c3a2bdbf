// How a weight[n, k] lies in memory, the same for every compiled rung: blocks of 32 outputs, each one sequential stream
// over k, so that a product with few rows reads memory once, in order. Both sizes are padded with zeros.
//
//   bf16: [n / 32][k / 32][2 tiles][16 pairs of k][16 outputs][2]   a tile is the right operand of one AMX product
//   f32:  [n / 32][k][32 outputs]
#pragma once
#include <cstdint>

namespace tilerank {

constexpr int64_t kBlockN = 32;  // outputs
constexpr int64_t kBlockK = 32;  // inputs, bf16 only
constexpr int64_t kTile = 512;   // elements of a 16 x 32 bf16 tile, 1 KiB

constexpr int64_t blocks(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }

}  // namespace tilerank
