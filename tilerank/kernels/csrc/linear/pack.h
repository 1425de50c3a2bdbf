// The memory layout of a packed weight[n, k], the same for every compiled rung: blocks of 32 outputs, each stored
// sequentially over k, so that a product with few rows reads memory once and in order. Both sizes are padded with
// zeros.
//
//   bf16: [n / 32][k / 32][2 tiles][16 pairs of k][16 outputs][2]   a tile is the right operand of one AMX product
//   f32:  [n / 32][k][32 outputs]
#pragma once
#include "core/kernel.h"

namespace tilerank {

constexpr int64_t kBlockN = 32;  // outputs of a block
constexpr int64_t kTileK = 32;   // inputs of a bf16 tile
constexpr int64_t kTile = 512;   // elements of a bf16 tile of 16 outputs x 32 inputs, 1 KiB

constexpr int64_t blocks(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }

// A packed weight as a parameter of a kernel. from(i): the weight from block i on.
struct FloatWeight {
  static constexpr const char* kFields = "data";
  Tensor data;

  FloatWeight from(int64_t block) const { return {data.from(block)}; }
};

}  // namespace tilerank
