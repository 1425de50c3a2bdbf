// How an int8 weight[n, k] lies in memory, the same for every compiled rung: codes in blocks of 32 outputs, each one
// sequential stream over k, and an fp32 scale for each output; weight = code * scale. Both sizes are padded with zeros.
// Rungs whose products take one side without a sign want to know what the codes of an output add up to.
//
//   codes:  [n / 32][k / 64][2 tiles][16 fours of k][16 outputs][4]   a tile is the right operand of one AMX product
//   scales: [n / 32][32]
//   sums:   [n / 32][32] int32
#pragma once
#include "pack.h"

namespace tilerank {

constexpr int64_t kBlockK8 = 64;       // inputs
constexpr int64_t kBlockStep8 = 2048;  // bytes of a block for that many inputs

// Rows of activations while they are multiplied: bytes of their codes, which the rungs below AMX keep as they are.
constexpr int64_t row_bytes8(int64_t k) { return blocks(k, kBlockK8) * kBlockK8; }

}  // namespace tilerank
