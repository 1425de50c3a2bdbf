// Int8 weights: quantised while they are packed, packed as they were quantised, and rows looked up.
#ifndef TR_RUNG
#include "int8.h"
#include "kernel.h"

#define TR_SOURCE "pack_int8.cpp"
#include "foreach_isa.h"

#else
#include "int8_rows.h"

namespace tilerank::TR_RUNG {

// Output n's codes for inputs from 64 t on, 4 by 4, lie this far apart.
constexpr int64_t kFourStride = 64;

static inline int8_t* fours_of(int8_t* block, int64_t n, int64_t t) {
  return block + t * kBlockStep8 + n % kBlockN / 16 * 1024 + n % 16 * 4;
}

static inline void scatter_fours(int8_t* to, const int8_t* codes) {
  for (int64_t four = 0; four < 16; ++four) std::memcpy(to + four * kFourStride, codes + four * 4, 4);
}

static inline float as_float(const float* p) { return *p; }
static inline float as_float(const double* p) { return static_cast<float>(*p); }
static inline float as_float(const f16* p) { return _cvtsh_ss(p->bits); }
static inline float as_float(const bf16* p) { return to_float(*p); }

template <class T>
static void quantise_and_pack(const Tensor& codes, const Tensor& scales, const Tensor& rows, int64_t first,
                              Team& team) {
  const int64_t k = rows.size[1], stride = rows.stride[1];
  float* const values = static_cast<float*>(team.scratch(static_cast<size_t>(k) * sizeof(float)));
  const Range own = team.share(rows.size[0]);
  for (int64_t row = own.begin; row < own.end; ++row) {
    const int64_t n = first + row;
    const T* const from = rows.row<const T>(row);
    for (int64_t i = 0; i < k; ++i) values[i] = as_float(from + i * stride);
    int8_t* const block = codes.row<int8_t>(n / kBlockN);
    alignas(64) int8_t chunk[64];
    const Quantiser quantiser(largest_bits(values, k));
    for (int64_t i = 0; i < k; i += 64) {
      std::memset(chunk, 0, 64);
      if (quantiser.finite()) store_codes(chunk, values + i, std::min<int64_t>(64, k - i), set(quantiser.inverse));
      scatter_fours(fours_of(block, n, i / 64), chunk);
    }
    scales.row<float>(n / kBlockN)[n % kBlockN] = quantiser.step;
  }
}

// tensors: codes[blocks of 32 outputs, bytes of a block], scales[blocks, 32], both with blocks that may lie apart,
// rows[r, k] with any strides; ints: row
static void quantise_int8(const Args& args, Team& team) {
  const Tensor &codes = args.tensor(0), &scales = args.tensor(1), &rows = args.tensor(2);
  switch (rows.dtype) {
    case DType::f32:
      return quantise_and_pack<float>(codes, scales, rows, args.integer(0), team);
    case DType::f64:
      return quantise_and_pack<double>(codes, scales, rows, args.integer(0), team);
    case DType::f16:
      return quantise_and_pack<f16>(codes, scales, rows, args.integer(0), team);
    case DType::bf16:
      return quantise_and_pack<bf16>(codes, scales, rows, args.integer(0), team);
    default:
      throw Error("quantise_int8: expected rows of a floating-point dtype");
  }
}
TR_KERNEL(quantise_int8)

// tensors: codes, scales as above, rows[r, k] int8 with any strides, steps[r] f32; ints: row
static void pack_int8(const Args& args, Team& team) {
  const Tensor &codes = args.tensor(0), &scales = args.tensor(1), &rows = args.tensor(2), &steps = args.tensor(3);
  const int64_t k = rows.size[1], stride = rows.stride[1];
  const Range own = team.share(rows.size[0]);
  for (int64_t row = own.begin; row < own.end; ++row) {
    const int64_t n = args.integer(0) + row;
    const int8_t* const from = rows.row<const int8_t>(row);
    int8_t* const block = codes.row<int8_t>(n / kBlockN);
    for (int64_t i = 0; i < k; i += 64) {
      int8_t chunk[64] = {};
      for (int64_t j = 0; j < std::min<int64_t>(64, k - i); ++j) chunk[j] = from[(i + j) * stride];
      scatter_fours(fours_of(block, n, i / 64), chunk);
    }
    scales.row<float>(n / kBlockN)[n % kBlockN] = steps.as<const float>()[row * steps.stride[0]];
  }
}
TR_KERNEL(pack_int8)

// tensors: ids[t] i64, codes, scales (whole), out[t, k] bf16; ints: first_row, n
static void embedding_int8(const Args& args, Team& team) {
  const Tensor &ids = args.tensor(0), &out = args.tensor(3);
  constexpr int64_t kPiece = 512;  // columns of a task: a lone row of a decode step is read by several threads
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
    int8_t* const block = args.tensor(1).as<int8_t>() + n / kBlockN * row_bytes8(k) * kBlockN;
    const Vec scale = set(args.tensor(2).as<const float>()[n]);
    for (int64_t i = begin; i < end; i += 64) {
      const int8_t* const fours = fours_of(block, n, i / 64);
      float values[64];
      for (int64_t j = 0; j < 64; ++j) values[j] = static_cast<float>(fours[j / 4 * kFourStride + j % 4]);
      for (int64_t j = 0; j < std::min<int64_t>(64, end - i); j += kLanes) {
        store(to + i + j, load(values + j) * scale, std::min<int64_t>(kLanes, end - i - j));
      }
    }
  }
}
TR_KERNEL(embedding_int8)

}  // namespace tilerank::TR_RUNG
#endif
