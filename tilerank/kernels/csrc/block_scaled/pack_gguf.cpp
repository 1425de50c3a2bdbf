// pack_gguf: writes blocks of a GGUF file into a weight in their format (gguf.h).
#ifndef TR_RUNG
#include <string>

#include "block_scaled/gguf.h"
#define TR_SOURCE "block_scaled/pack_gguf.cpp"
#include "simd/foreach_isa.h"
#else
#include "block_scaled/gguf_blocks-inl.h"
#include "block_scaled/gguf_planes-inl.h"

namespace tilerank::TR_RUNG {

// Writes the codes of a group of output n to its half of a tile.
template <class Planes>
static inline void put_group(uint8_t* tile, int64_t n, const uint8_t* codes) {
  constexpr uint64_t kEven = 0x000f000f000f000f, kPairs = 0x0303030303030303, kSingles = 0x0101010101010101;
  for (int64_t run = 0; run < Planes::kRuns; ++run) {
    uint64_t eight;
    std::memcpy(&eight, codes + run * 8, 8);
    const auto put = [](uint8_t* to, uint64_t bits, size_t size) { std::memcpy(to, &bits, size); };
    if (Planes::kNibbles) {  // in the order of nibble_shift
      put(tile + run * 64 + n * 4, _pext_u64(eight, kEven) | _pext_u64(eight, kEven << 8) << 16, 4);
    }
    if (Planes::kPairs) {
      put(tile + Planes::kPairsAt + run * 32 + n * 2, _pext_u64(eight, kPairs << (Planes::kNibbles ? 4 : 0)), 2);
    }
    if (Planes::kSingles) {
      put(tile + Planes::kSinglesAt + run * 16 + n, _pext_u64(eight, kSingles << (Planes::kNibbles ? 4 : 2)), 1);
    }
  }
}

// The same for codes of 8 bits, in the order of block_scaled.h.
struct WholeCodes {
  static constexpr int64_t kInputs = kTileK, kBytes = kHalfN * kTileK;
};
template <>
inline void put_group<WholeCodes>(uint8_t* tile, int64_t n, const uint8_t* codes) {
  uint8_t* const to = tile + n / 4 * 16 + n % 4 * 2;
  for (int64_t i = 0; i < WholeCodes::kInputs; i += 2) std::memcpy(to + i / 4 * 64 + i % 4 * 4, codes + i, 2);
}

static inline void check_finite(uint16_t bits, int64_t row, int64_t block) {
  constexpr int kExponent = 0x7c00;
  if ((bits & kExponent) != kExponent) return;
  const char* const found = bits & 0x3ff ? "nan" : bits >> 15 ? "-inf" : "inf";
  throw Error("expected finite scales, found " + std::string(found) + " in row " + std::to_string(row) + ", block " +
              std::to_string(block));
}

// Writes rows of blocks stored[r, blocks, bytes] of a type to a weight, from row `row` on. sources[g]: the group of the
// stored values that is group g of the weight.
TR_ENTRY(pack_gguf, Team& team, const GgufWeight& w, const Tensor& stored, const Tensor& sources, int64_t row,
         int64_t type, int64_t bits, int64_t block) {
  // No two threads write to one block of outputs.
  const int64_t first = row / kBlockN, end = row + stored.size[0];
  const Range own = team.share(blocks(end, kBlockN) - first);
  const int64_t kinds = w.scales.size[2], subkinds = w.subscales ? w.subscales.size[2] : 0;
  const int64_t before = w.first();
  const int shift = w.shift();
  const int32_t* const source_of = sources.as<const int32_t>();
  const auto pack = [&](auto planes) {
    using Planes = decltype(planes);
    FileBlock found{};
    for (int64_t n = std::max(row, (first + own.begin) * kBlockN); n < std::min(end, (first + own.end) * kBlockN);
         ++n) {
      const int64_t output = n % kBlockN;
      int64_t held = -1;
      for (int64_t group = 0; group < sources.size[0]; ++group) {
        const int64_t value = source_of[group] * Planes::kInputs, number = value / block, at = value % block;
        if (number != held) {
          held = number;
          read_block(type, stored.row<const uint8_t>(n - row) + number * stored.stride[1], found);
          check_finite(found.scale, n - row, number);
          if (kinds == 2) check_finite(found.minimum, n - row, number);
        }
        put_group<Planes>(tile_of<Planes>(w.values, n, group * Planes::kInputs), n % kHalfN, found.codes + at);
        uint16_t* const scale =
            w.scales.row<uint16_t>(n / kBlockN) + ((before + group) >> shift) * kinds * kBlockN + output;
        *scale = found.scale;
        if (kinds == 2) scale[kBlockN] = found.minimum;
        if (!subkinds) continue;
        const int8_t factor = found.subscales[at / Planes::kInputs], other = found.subminimums[at / Planes::kInputs];
        int8_t* const to = w.subscales.row<int8_t>(n / kBlockN) + (before + group) * subkinds * kBlockN + output;
        *to = bits == 2 ? static_cast<int8_t>(factor | other << 4) : factor;
        if (subkinds == 2) to[kBlockN] = other;
      }
    }
  };
  bits == 8 ? pack(WholeCodes()) : for_planes(bits, pack);
}

}  // namespace tilerank::TR_RUNG
#endif
