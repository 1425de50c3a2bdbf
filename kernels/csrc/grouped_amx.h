// Products of rows with the weights of grouped.h in AMX tiles, for the *_amx.cpp that includes this file.
#pragma once
#include "gemm_amx.h"
#include "grouped_formats.h"

namespace tilerank::TR_RUNG {

// Every group's products are summed in tiles of 32 inputs in order, from zero; group by group, in order, that sum less
// zero * (sum of the inputs) is multiplied with the scale and added, fused. So do few rows and many, and a row's bits
// do not depend on its batch.

// The sum of `tiles` tiles of one row.
static inline float sum_of_inputs(const char* row, int64_t tile_stride, int64_t tiles) {
  Vec even = zero(), odd = zero();
  for (int64_t t = 0; t < tiles; ++t) {
    const __m512i pairs = _mm512_loadu_si512(row + t * tile_stride);
    even = even + Vec{_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
    odd = odd + Vec{_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  return sum(even + odd);
}

// Many rows: the inputs are cut in panels of whole groups, a block's panel of the weight is expanded once into the
// first level cache and used by all rows of a stripe, whose panel and sums over a band of blocks stay in the second.
struct GroupedBlocking {
  static constexpr int64_t kStripe = 24, kBand = 12;  // row tiles, blocks

  template <class Format>
  static int64_t panel(const Format& weight) {
    constexpr int64_t kTiles = 8;
    return std::max<int64_t>(1, kTiles / weight.group_tiles) * weight.group_tiles;
  }
};

struct GroupedMemory {
  float* sums;        // [band][pairs of row tiles][kPairSums]
  bf16* expanded;     // [panel][2 tiles]
  float* group_sums;  // [row tiles of a stripe][groups of a panel][16]

  static size_t bytes(int64_t panel) {
    constexpr int64_t kSums = GroupedBlocking::kStripe / 2 * GroupedBlocking::kBand * kPairSums;
    return kSums * sizeof(float) + panel * (kBlockStep + GroupedBlocking::kStripe * kTileRows * sizeof(float));
  }
  GroupedMemory(void* memory, int64_t panel) {
    sums = static_cast<float*>(memory);
    expanded = reinterpret_cast<bf16*>(sums + GroupedBlocking::kStripe / 2 * GroupedBlocking::kBand * kPairSums);
    group_sums = reinterpret_cast<float*>(expanded + panel * 2 * kTile);
  }
};

// One or two row tiles with a block, over a panel.
template <class Format, int kRowTiles, bool kZeros>
struct PairPanel {
  const char *rows0, *rows1;
  const bf16* expanded;
  const Format& weight;
  int64_t block, first_group, groups, tiles;
  const float* inputs0;  // sums of a row tile's inputs, by group
  const float* inputs1;
  float* sums;

  // The products of a group, summed in tiles 0 to 3.
  void multiply(int64_t group) const {
    tile_zero<0>();
    tile_zero<1>();
    if (kRowTiles == 2) tile_zero<2>();
    if (kRowTiles == 2) tile_zero<3>();
    const int64_t end = std::min((group + 1) * weight.group_tiles, tiles);
    for (int64_t t = group * weight.group_tiles; t < end; ++t) {
      tile_load<4>(rows0 + t * kTileBytes, 64);
      tile_load<6>(expanded + t * 2 * kTile, 64);
      tile_dot_bf16<0, 4, 6>();
      tile_load<7>(expanded + t * 2 * kTile + kTile, 64);
      tile_dot_bf16<1, 4, 7>();
      if (kRowTiles == 2) {
        tile_load<5>(rows1 + t * kTileBytes, 64);
        tile_dot_bf16<2, 5, 6>();
        tile_dot_bf16<3, 5, 7>();
      }
    }
  }

  static void store_tiles(float* to) {
    tile_store<0>(to, 64);
    tile_store<1>(to + 256, 64);
    if (kRowTiles == 2) tile_store<2>(to + 512, 64);
    if (kRowTiles == 2) tile_store<3>(to + 768, 64);
  }

  // Adds kCount groups' scaled sums.
  template <int kCount>
  void add(int64_t group, const float* fresh) const {
    const bool first = first_group + group == 0;
#pragma GCC unroll 4
    for (int t = 0; t < kRowTiles * 2; ++t) {
      Vec scale[kCount], less[kCount];
      for (int g = 0; g < kCount; ++g) {
        scale[g] = weight.scale(block, first_group + group + g, t % 2);
        if constexpr (kZeros) less[g] = weight.negative_zero(block, first_group + group + g, t % 2);
      }
      const float* const inputs = (t / 2 ? inputs1 : inputs0) + group * kTileRows;
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) {
        float* const to = sums + (t * kTileRows + r) * kLanes;
        Vec total = first ? zero() : load(to);
        for (int g = 0; g < kCount; ++g) {
          Vec products = load(fresh + g * kPairSums + (t * kTileRows + r) * kLanes);
          if constexpr (kZeros) products = fma(less[g], set(inputs[g * kTileRows + r]), products);
          total = fma(products, scale[g], total);
        }
        store(to, total);
      }
    }
  }

  // Groups two by two; they are added while the next two are multiplied.
  void run() const {
    alignas(64) float fresh[2][2][kPairSums];
    const auto slot = [&](int64_t group) { return fresh[group / 2 % 2][0]; };
    for (int64_t group = 0; group < groups; group += 2) {
      multiply(group);
      if (group > 0) add<2>(group - 2, slot(group - 2));
      store_tiles(slot(group));
      if (group + 1 < groups) {
        multiply(group + 1);
        store_tiles(slot(group) + kPairSums);
      }
    }
    const int64_t last = (groups - 1) / 2 * 2;
    groups % 2 ? add<1>(last, slot(last)) : add<2>(last, slot(last));
  }
};

// As multiply_band of gemm_amx.h; `rows` in panels of GroupedBlocking.
template <int kParts, bool kZeros, class Format, class Finish>
static void multiply_grouped_band(const PackedRows& rows, Range stripe, const Format& weight, Range band, int64_t m,
                                  const GroupedMemory& memory, const Finish& finish) {
  const int64_t pairs = blocks(stripe.end - stripe.begin, 2), panels = blocks(rows.k_tiles, rows.panel);
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t k_tiles = rows.panel_tiles(panel), groups = blocks(k_tiles, weight.group_tiles);
    const int64_t first_tile = panel * rows.panel, first_group = first_tile / weight.group_tiles;
    if constexpr (kZeros) {
      for (int64_t tile = stripe.begin; tile < stripe.end; ++tile) {
        for (int64_t group = 0; group < groups; ++group) {
          const int64_t first = group * weight.group_tiles, tiles = std::min(weight.group_tiles, k_tiles - first);
          for (int64_t r = 0; r < kTileRows; ++r) {
            memory.group_sums[((tile - stripe.begin) * groups + group) * kTileRows + r] =
                sum_of_inputs(rows.tiles(panel, tile) + first * kTileBytes + r * 64, kTileBytes, tiles);
          }
        }
      }
    }
    for (int64_t block = band.begin; block < band.end; ++block) {
      const int64_t next = block + 1 < band.end ? block + 1 : panel + 1 < panels ? band.begin : band.end - 1;
      const int64_t next_tile = block + 1 < band.end || panel + 1 == panels ? first_tile : first_tile + rows.panel;
      const char *const from = weight.tile(block, first_tile), *const ahead = weight.tile(next, next_tile);
      for (int64_t half = 0; half < k_tiles * 2; ++half) {
        for (int64_t i = 0; i < Format::kPackedTile; i += 64) prefetch_l2(ahead + half * Format::kPackedTile + i);
        Format::expand(from + half * Format::kPackedTile, memory.expanded + half * kTile);
      }
      const auto sums_of = [&](int64_t b, int64_t pair) {
        return memory.sums + ((b - band.begin) * pairs + pair) * kPairSums;
      };
      const bool last = panel + 1 == panels && block % kParts == kParts - 1;
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t tile = stripe.begin + pair * 2;
        const char* const rows0 = rows.tiles(panel, tile);
        const float* const inputs0 = memory.group_sums + pair * 2 * groups * kTileRows;
        const Range range{tile * kTileRows, std::min({(tile + 2) * kTileRows, stripe.end * kTileRows, m})};
        if (tile + 1 < stripe.end) {
          PairPanel<Format, 2, kZeros>{
              rows0,   rows0 + k_tiles * kTileBytes, memory.expanded,     weight, block, first_group, groups, k_tiles,
              inputs0, inputs0 + groups * kTileRows, sums_of(block, pair)}
              .run();
        } else {
          PairPanel<Format, 1, kZeros>{
              rows0,   nullptr, memory.expanded,     weight, block, first_group, groups, k_tiles,
              inputs0, nullptr, sums_of(block, pair)}
              .run();
        }
        if (last) {
          const float* parts[kParts];
          for (int part = 0; part < kParts; ++part) parts[part] = sums_of(block - kParts + 1 + part, pair);
          finish.write(parts, range, block / kParts);
        }
      }
    }
  }
}

template <int kParts, class Format, class Finish>
static void multiply_grouped_band(const PackedRows& rows, Range stripe, const Format& weight, Range band, int64_t m,
                                  const GroupedMemory& memory, const Finish& finish) {
  if constexpr (Format::kMayHaveZeros) {
    if (weight.has_zeros()) return multiply_grouped_band<kParts, true>(rows, stripe, weight, band, m, memory, finish);
  }
  multiply_grouped_band<kParts, false>(rows, stripe, weight, band, m, memory, finish);
}

}  // namespace tilerank::TR_RUNG
