// embedding_gguf: rows of a weight in a block format of GGUF (gguf.h).
#ifndef TR_RUNG
#include "block_scaled/gguf.h"
#define TR_SOURCE "block_scaled/embedding_gguf.cpp"
#include "simd/foreach_isa.h"
#else
#include "block_scaled/gguf_planes-inl.h"

namespace tilerank::TR_RUNG {

// The code of one input.
template <class Planes>
static inline int code_at(const uint8_t* tile, int64_t n, int64_t input) {
  const int64_t run = input / 8, i = input % 8;
  constexpr int kLow = Planes::kNibbles ? 4 : 2;
  int code = 0;
  if (Planes::kNibbles) {
    uint32_t word;
    std::memcpy(&word, tile + run * 64 + n * 4, 4);
    code = static_cast<int>(word >> nibble_shift(static_cast<int>(i)) & 15);
  }
  if (Planes::kPairs) {
    uint16_t word;
    std::memcpy(&word, tile + Planes::kPairsAt + run * 32 + n * 2, 2);
    code |= (word >> 2 * i & 3) << (Planes::kNibbles ? 4 : 0);
  }
  if (Planes::kSingles) code |= (tile[Planes::kSinglesAt + run * 16 + n] >> i & 1) << kLow;
  return code;
}

static inline float number_of(const f16* at) { return _cvtsh_ss(at->bits); }

// out[ids, k] bf16: rows of w, zeros for ids outside of [first_row, first_row + n). kind: bits of a code; 8: bytes;
// 0: IQ4.
TR_ENTRY(embedding_gguf, Team& team, const Tensor& ids, const GgufWeight& w, int64_t first_row, int64_t n, int64_t k,
         int64_t kind, const Tensor& out) {
  constexpr int64_t kColumns = 512;  // of a task, so that several threads share a lone row
  const int64_t parts = blocks(k, kColumns), first = w.first();
  const int64_t kinds = w.scales.size[2], subkinds = w.subscales ? w.subscales.size[2] : 0;
  const int shift = w.shift();
  const Range tasks = team.share(ids.size[0] * parts);
  const auto unpack = [&](auto planes, int64_t row, Range columns, bf16* to) {
    using Planes = decltype(planes);
    const bool bytes = kind == 8, table = kind == 0;
    const int64_t inputs = bytes ? kTileK : Planes::kInputs, block = row / kBlockN, output = row % kBlockN;
    const int middle = bytes || table || kinds == 2 ? 0 : 1 << (kind - 1);
    for (int64_t column = columns.begin; column < columns.end; ++column) {
      const int64_t group = column / inputs;
      const f16* const at = w.scales.row<const f16>(block) + ((first + group) >> shift) * kinds * kBlockN + output;
      int number;
      if (bytes) {
        const int64_t i = column % kTileK, o = output % kHalfN;
        const uint8_t* const tile = w.values.row<uint8_t>(block) + (group * 2 + output / kHalfN) * w.values.size[4];
        // The order of the bytes of a line is that of block_scaled.h.
        number = static_cast<int8_t>(tile[i / 4 * 64 + o / 4 * 16 + i % 4 / 2 * 8 + o % 4 * 2 + i % 2]);
      } else {
        const int code = code_at<Planes>(tile_of<Planes>(w.values, row, column), output % kHalfN, column % inputs);
        number = table ? kIq4Numbers[code] : code - middle;
      }
      float scale = number_of(at), minimum = kinds == 2 ? number_of(at + kBlockN) : 0;
      if (w.subscales) {
        const int8_t* const factors =
            w.subscales.row<const int8_t>(block) + (first + group) * subkinds * kBlockN + output;
        scale *= static_cast<float>(kind == 2 ? *factors & 15 : *factors);
        if (kinds == 2) minimum *= static_cast<float>(kind == 2 ? *factors >> 4 & 15 : factors[kBlockN]);
      }
      const float value = std::fma(scale, static_cast<float>(number), minimum);
      Vec rounded = set(value);
      store(to + column, rounded, 1);
    }
  };
  for (int64_t task = tasks.begin; task < tasks.end; ++task) {
    const int64_t row = ids.as<int64_t>()[task / parts * ids.stride[0]] - first_row, column = task % parts * kColumns;
    const Range columns{column, std::min(column + kColumns, k)};
    bf16* const to = out.as<bf16>() + task / parts * k;
    if (row < 0 || row >= n) {
      std::memset(to + column, 0, static_cast<size_t>(columns.end - columns.begin) * sizeof(bf16));
    } else {
      for_planes(kind == 0 || kind == 8 ? 4 : kind, [&](auto planes) { unpack(planes, row, columns, to); });
    }
  }
}

}  // namespace tilerank::TR_RUNG
#endif
