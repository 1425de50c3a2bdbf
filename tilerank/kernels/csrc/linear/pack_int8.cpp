// Int8 weights: quantise_int8 quantises and packs rows, pack_int8 packs quantised rows, embedding_int8 looks up rows.
#ifndef TR_RUNG
#include <array>

#include "linear/int8.h"
#include "core/kernel.h"

#define TR_SOURCE "linear/pack_int8.cpp"
#include "simd/foreach_isa.h"

#else
#include "simd/blocks-inl.h"
#include "linear/int8_rows-inl.h"
#include "linear/source_rows-inl.h"

namespace tilerank::TR_RUNG {

// Bytes between consecutive quads of codes of one output.
constexpr int64_t kQuadStride = 64;

// Returns the first quad of output n for inputs from 64 t on.
static inline int8_t* quads_of(int8_t* block, int64_t n, int64_t t) {
  return block + t * kInt8BlockStep + n % kBlockN / 16 * 1024 + n % 16 * 4;
}

// The operands of a weight with any block stride.
struct Int8Blocks {
  const Tensor &codes, &scales, &sums;

  // Writes output n. codes_at(chunk, t) fills `chunk` with the codes of inputs from 64 t on.
  template <class CodesAt>
  void put(int64_t n, int64_t k, float scale, const CodesAt& codes_at) const {
    const int64_t block = n / kBlockN, output = n % kBlockN;
    int32_t sum = 0;
    for (int64_t t = 0; t < blocks(k, kInt8TileK); ++t) {
      alignas(64) int8_t chunk[kInt8TileK] = {};
      codes_at(chunk, t);
      int8_t* const to = quads_of(codes.row<int8_t>(block), n, t);
      for (int64_t quad = 0; quad < 16; ++quad) std::memcpy(to + quad * kQuadStride, chunk + quad * 4, 4);
      for (const int8_t code : chunk) sum += code;
    }
    scales.row<float>(block)[output] = scale;
    sums.row<int32_t>(block)[output] = sum;
  }
};

template <class T>
static void quantise_and_pack(const Int8Blocks& weight, const Tensor& rows, int64_t first, Team& team) {
  const int64_t k = rows.size[1], stride = rows.stride[1];
  float* const values = static_cast<float*>(team.scratch(static_cast<size_t>(k) * sizeof(float)));
  const Range own = team.share(rows.size[0]);
  for (int64_t row = own.begin; row < own.end; ++row) {
    const T* const from = rows.row<const T>(row);
    for (int64_t i = 0; i < k; ++i) values[i] = as_float(from + i * stride);
    const Quantiser quantiser(largest_bits(values, k));
    weight.put(first + row, k, quantiser.scale, [&](int8_t* chunk, int64_t t) {
      const int64_t i = t * kInt8TileK;
      if (quantiser.finite()) store_codes(chunk, values + i, std::min(kInt8TileK, k - i), set(quantiser.inverse));
    });
  }
}

// tensors: codes[blocks of 32 outputs, bytes of a block], scales[blocks, 32] and sums[blocks, 32] with any block
// stride, rows[r, k] with any strides; ints: row
static void quantise_int8(const Args& args, Team& team) {
  const Int8Blocks weight{args.tensor(0), args.tensor(1), args.tensor(2)};
  const Tensor& rows = args.tensor(3);
  for_source("quantise_int8", rows.dtype,
             [&](auto type) { quantise_and_pack<decltype(type)>(weight, rows, args.integer(0), team); });
}
TR_KERNEL(quantise_int8)

// tensors: codes, scales, sums as in quantise_int8, rows[r, k] int8 with any strides, row_scales[r] f32; ints: row
static void pack_int8(const Args& args, Team& team) {
  const Int8Blocks weight{args.tensor(0), args.tensor(1), args.tensor(2)};
  const Tensor &rows = args.tensor(3), &row_scales = args.tensor(4);
  const int64_t k = rows.size[1], stride = rows.stride[1];
  const Range own = team.share(rows.size[0]);
  for (int64_t row = own.begin; row < own.end; ++row) {
    const int8_t* const from = rows.row<const int8_t>(row);
    const float scale = row_scales.as<const float>()[row * row_scales.stride[0]];
    weight.put(args.integer(0) + row, k, scale, [&](int8_t* chunk, int64_t t) {
      const int64_t i = t * kInt8TileK;
      for (int64_t j = 0; j < std::min(kInt8TileK, k - i); ++j) chunk[j] = from[(i + j) * stride];
    });
  }
}
TR_KERNEL(pack_int8)

// tensors: ids[t] i64, codes and scales (contiguous), out[t, k] bf16; ints: first_row, n
static void embedding_int8(const Args& args, Team& team) {
  const Tensor &ids = args.tensor(0), &out = args.tensor(3);
  constexpr int64_t kPiece = 512;  // columns of a task: several threads share the single row of a decode step
  const int64_t k = out.size[1], pieces = blocks(k, kPiece);
  const Range tasks = team.share(ids.size[0] * pieces);
  for (int64_t task = tasks.begin; task < tasks.end; ++task) {
    const int64_t n = ids.as<int64_t>()[task / pieces * ids.stride[0]] - args.integer(0);
    const int64_t begin = task % pieces * kPiece, end = std::min(begin + kPiece, k);
    bf16* const to = out.row<bf16>(task / pieces);
    if (n < 0 || n >= args.integer(1)) {
      std::memset(to + begin, 0, static_cast<size_t>(end - begin) * sizeof(bf16));
      continue;
    }
    int8_t* const block = args.tensor(1).as<int8_t>() + n / kBlockN * int8_row_bytes(k) * kBlockN;
    const Vec scale = set(args.tensor(2).as<const float>()[n]);
    for (int64_t i = begin; i < end; i += 64) {
      const int8_t* const quads = quads_of(block, n, i / 64);
      float values[64];
      for (int64_t j = 0; j < 64; ++j) values[j] = static_cast<float>(quads[j / 4 * kQuadStride + j % 4]);
      for (int64_t j = 0; j < std::min<int64_t>(64, end - i); j += kLanes) {
        store(to + i + j, load(values + j) * scale, std::min<int64_t>(kLanes, end - i - j));
      }
    }
  }
}
TR_KERNEL(embedding_int8)

}  // namespace tilerank::TR_RUNG
#endif
