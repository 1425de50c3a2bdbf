// Int8 weights: quantise_int8 quantises and packs rows, pack_int8 packs quantised rows, embedding_int8 looks up rows.
#ifndef TR_RUNG
#include <array>

#include "core/entry.h"
#include "linear/int8.h"

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
static inline uint8_t* quads_of(uint8_t* block, int64_t n, int64_t t) {
  return block + t * kInt8BlockStep + n % kBlockN / 16 * 1024 + n % 16 * 4;
}

// Writes output n of a weight with any block stride. codes_at(chunk, t) fills `chunk` with the codes of inputs from 64
// t on.
template <class CodesAt>
static void put_output(const Int8Weight& w, int64_t n, int64_t k, float scale, const CodesAt& codes_at) {
  const int64_t block = n / kBlockN;
  for (int64_t t = 0; t < blocks(k, kInt8TileK); ++t) {
    alignas(64) int8_t chunk[kInt8TileK] = {};
    codes_at(chunk, t);
    uint8_t* const to = quads_of(w.codes.row<uint8_t>(block), n, t);
    for (int64_t i = 0; i < kInt8TileK; ++i)
      to[i / 4 * kQuadStride + i % 4] = static_cast<uint8_t>(chunk[i] + kInt8Zero);
  }
  w.scales.row<float>(block)[n % kBlockN] = scale;
}

template <class T>
static void quantise_and_pack(const Int8Weight& w, const Tensor& rows, int64_t first, Team& team) {
  const int64_t k = rows.size[1], stride = rows.stride[1];
  float* const values = static_cast<float*>(team.scratch(static_cast<size_t>(k) * sizeof(float)));
  const Range own = team.share(rows.size[0]);
  for (int64_t row = own.begin; row < own.end; ++row) {
    const T* const from = rows.row<const T>(row);
    for (int64_t i = 0; i < k; ++i) values[i] = as_float(from + i * stride);
    const Quantiser quantiser(largest_bits(values, k));
    put_output(w, first + row, k, quantiser.scale, [&](int8_t* chunk, int64_t t) {
      const int64_t i = t * kInt8TileK;
      store_codes(chunk, values + i, std::min(kInt8TileK, k - i), quantiser);
    });
  }
}

// rows[r, k] with any strides
TR_ENTRY(quantise_int8, Team& team, const Int8Weight& w, const Tensor& rows, int64_t row) {
  for_source("quantise_int8", rows.dtype, [&](auto type) { quantise_and_pack<decltype(type)>(w, rows, row, team); });
}

// codes[r, k] with any strides
TR_ENTRY(pack_int8, Team& team, const Int8Weight& w, const Tensor& codes, const Tensor& scales, int64_t row) {
  const int64_t k = codes.size[1], stride = codes.stride[1];
  const Range own = team.share(codes.size[0]);
  for (int64_t r = own.begin; r < own.end; ++r) {
    const int8_t* const from = codes.row<const int8_t>(r);
    put_output(w, row + r, k, *scales.row<const float>(r), [&](int8_t* chunk, int64_t t) {
      const int64_t i = t * kInt8TileK;
      for (int64_t j = 0; j < std::min(kInt8TileK, k - i); ++j) chunk[j] = from[(i + j) * stride];
    });
  }
}

TR_ENTRY(embedding_int8, Team& team, const Tensor& ids, const Int8Weight& w, int64_t first_row, int64_t n,
         const Tensor& out) {
  constexpr int64_t kPiece = 512;  // columns of a task: several threads share the single row of a decode step
  const int64_t k = out.size[1], pieces = blocks(k, kPiece);
  const Range tasks = team.share(ids.size[0] * pieces);
  for (int64_t task = tasks.begin; task < tasks.end; ++task) {
    const int64_t row = *ids.row<int64_t>(task / pieces) - first_row;
    const int64_t begin = task % pieces * kPiece, end = std::min(begin + kPiece, k);
    bf16* const to = out.row<bf16>(task / pieces);
    if (row < 0 || row >= n) {
      std::memset(to + begin, 0, static_cast<size_t>(end - begin) * sizeof(bf16));
      continue;
    }
    uint8_t* const block = w.codes.row<uint8_t>(row / kBlockN);
    const Vec scale = set(w.scales.row<const float>(row / kBlockN)[row % kBlockN]);
    for (int64_t i = begin; i < end; i += 64) {
      const uint8_t* const quads = quads_of(block, row, i / 64);
      float values[64];
      for (int64_t j = 0; j < 64; ++j) values[j] = static_cast<float>(quads[j / 4 * kQuadStride + j % 4] - kInt8Zero);
      for (int64_t j = 0; j < std::min<int64_t>(64, end - i); j += kLanes) {
        store(to + i + j, load(values + j) * scale, std::min<int64_t>(kLanes, end - i - j));
      }
    }
  }
}

}  // namespace tilerank::TR_RUNG
#endif
