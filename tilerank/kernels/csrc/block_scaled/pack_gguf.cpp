// pack_gguf: writes codes into a weight in a block format of GGUF (gguf.h). embedding_gguf: rows of such a weight.
#ifndef TR_RUNG
#include "block_scaled/gguf.h"
#define TR_SOURCE "block_scaled/pack_gguf.cpp"
#include "simd/foreach_isa.h"
#else

namespace tilerank::TR_RUNG {

// Calls f(planes) for the planes of so many bits.
template <class F>
static void for_planes(int64_t bits, const F& f) {
  switch (bits) {
    case 2:
      return f(CodePlanes<2>());
    case 3:
      return f(CodePlanes<3>());
    case 4:
      return f(CodePlanes<4>());
    case 5:
      return f(CodePlanes<5>());
    default:
      return f(CodePlanes<6>());
  }
}

// The tile of output n whose inputs begin at k.
template <class Planes>
static inline uint8_t* tile_of(const Tensor& values, int64_t n, int64_t k) {
  return values.row<uint8_t>(n / kBlockN) + (k / Planes::kInputs * 2 + n % kBlockN / kHalfN) * Planes::kBytes;
}

// Writes the codes of a run of 8 inputs of output n.
template <class Planes>
static inline void put_run(uint8_t* tile, int64_t n, int64_t run, const uint8_t* codes) {
  uint32_t nibbles = 0, pairs = 0, singles = 0;
  constexpr int kLow = Planes::kNibbles ? 4 : 2;
  for (int i = 0; i < 8; ++i) {
    nibbles |= (codes[i] & 15u) << nibble_shift(i);
    pairs |= (Planes::kNibbles ? codes[i] >> 4 & 3u : codes[i] & 3u) << 2 * i;
    singles |= (codes[i] >> kLow & 1u) << i;
  }
  const auto put = [](uint8_t* to, uint32_t bits, size_t size) { std::memcpy(to, &bits, size); };
  if (Planes::kNibbles) put(tile + run * 64 + n * 4, nibbles, 4);
  if (Planes::kPairs) put(tile + Planes::kPairsAt + run * 32 + n * 2, pairs, 2);
  if (Planes::kSingles) put(tile + Planes::kSinglesAt + run * 16 + n, singles, 1);
}

// Writes codes[r, c] u8 to the first c columns from row `row` on. Their rows are contiguous; c is a multiple of 8.
TR_ENTRY(pack_gguf, Team& team, const Tensor& w_values, const Tensor& codes, int64_t row, int64_t bits) {
  // No two threads write to one block of outputs.
  const int64_t first = row / kBlockN, columns = codes.size[1];
  const Range own = team.share(blocks(row + codes.size[0], kBlockN) - first);
  for_planes(bits, [&](auto planes) {
    using Planes = decltype(planes);
    const int64_t begin = std::max(row, (first + own.begin) * kBlockN);
    const int64_t end = std::min(row + codes.size[0], (first + own.end) * kBlockN);
    for (int64_t n = begin; n < end; ++n) {
      const uint8_t* const from = codes.row<const uint8_t>(n - row);
      for (int64_t k = 0; k < columns; k += 8) {
        put_run<Planes>(tile_of<Planes>(w_values, n, k), n % kHalfN, k % Planes::kInputs / 8, from + k);
      }
    }
  });
}

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
  const int64_t parts = blocks(k, kColumns), scale_blocks = w.scales.size[1];
  const int64_t groups = w.groups(), kinds = w.scales.size[2], subkinds = w.subscales ? w.subscales.size[3] : 0;
  const Range tasks = team.share(ids.size[0] * parts);
  const auto unpack = [&](auto planes, int64_t row, Range columns, bf16* to) {
    using Planes = decltype(planes);
    const bool bytes = kind == 8, table = kind == 0;
    const int64_t inputs = bytes ? kTileK : Planes::kInputs, block = row / kBlockN, output = row % kBlockN;
    const int middle = bytes || table || kinds == 2 ? 0 : 1 << (kind - 1);
    for (int64_t column = columns.begin; column < columns.end; ++column) {
      const int64_t group = column / inputs;
      const f16* const at =
          w.scales.as<const f16>() + (block * scale_blocks + group / groups) * kinds * kBlockN + output;
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
            w.subscales.as<const int8_t>() + (block * scale_blocks * groups + group) * subkinds * kBlockN + output;
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
