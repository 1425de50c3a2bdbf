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
// Measured: panels of 16 tiles take a quarter longer; other bands are no better.
struct GroupedBlocking {
  static constexpr int64_t kStripe = 32, kBand = 12;  // row tiles, blocks

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

// The products of row tiles with a panel of a block of the weight, one after the other. Those of a group stay in the
// tiles: the next group stores each just before it needs the tile. Groups are scaled and added two by two, a tile at a
// time, while the next are multiplied.
template <int kParts, bool kZeros, class Format, class Finish>
class GroupedProducts {
 public:
  // One or two row tiles with a panel of a block.
  struct Run {
    const char *rows0, *rows1;
    int64_t block, first_group, groups, tiles;
    const float *inputs0, *inputs1;  // sums of a row tile's inputs, by group
    float* sums;
    Range rows;
    const float* gate;  // the sums before these, if the two of them are one result
    bool finishes;
  };

  // Tiles that take the place of a panel that is multiplied for the last time, no more than it has, and those whose
  // turn is after them.
  struct Next {
    const char *values, *after;
    int64_t tiles = 0;
  };

  GroupedProducts(const Format& weight, const Finish& finish) : weight_(weight), finish_(finish) {}

  template <int kRowTiles>
  void multiply(const Run& run, bf16* expanded, const Next& next) {
    for (int64_t group = 0; group < run.groups; ++group) {
      const int64_t begin = group * weight_.group_tiles, end = std::min(begin + weight_.group_tiles, run.tiles);
      for (int64_t t = begin; t < end; ++t) {
        const bool first = t == begin;
        tile_load_stream<4>(run.rows0 + t * kTileBytes, 64);
        tile_load<6>(expanded + t * 2 * kTile, 64);
        if (first) start<0>();
        tile_dot_bf16<0, 4, 6>();
        tile_load<7>(expanded + t * 2 * kTile + kTile, 64);
        if (first) start<1>();
        tile_dot_bf16<1, 4, 7>();
        if constexpr (kRowTiles == 2) {
          tile_load_stream<5>(run.rows1 + t * kTileBytes, 64);
          if (first) start<2>();
          tile_dot_bf16<2, 5, 6>();
          if (first) start<3>();
          tile_dot_bf16<3, 5, 7>();
        } else if (first) {
          store_tile<2>();
          store_tile<3>();
        }
        for (int64_t i = 0; i < (weight_.group_tiles == 1 ? 2 : 1) && added_ < adding_.tiles; ++i) add_tile();
        if (first) stored();
        if (t < next.tiles) expand(next, t, expanded);
      }
      const int64_t pair = group / 2 * 2, count = std::min<int64_t>(2, run.groups - pair);
      in_tiles_ = {run, pair, count, kRowTiles * 2, fresh_[turn_][0]};
      to_ = fresh_[turn_][group - pair];
      full_ = group - pair + 1 == count;
      if (full_) turn_ ^= 1;
    }
  }

  static void expand(const Next& next, int64_t tile, bf16* to) {
    for (int64_t half = tile * 2; half < tile * 2 + 2; ++half) {
      for (int64_t i = 0; i < Format::kPackedTile; i += 64) prefetch_l2(next.after + half * Format::kPackedTile + i);
      Format::expand(next.values + half * Format::kPackedTile, to + half * kTile);
    }
  }

  // Everything that is still in the tiles or not added.
  void complete() {
    store_tile<0>();
    store_tile<1>();
    store_tile<2>();
    store_tile<3>();
    stored();
    while (added_ < adding_.tiles) add_tile();
  }

 private:
  // Two groups of a run, or one.
  struct Groups {
    Run run;
    int64_t first, count;
    int tiles = 0;  // of sums
    const float* products;
  };

  template <int T>
  void store_tile() const {
    if (T < in_tiles_.tiles) tile_store<T>(to_ + T * kTileRows * kLanes, 64);
  }
  template <int T>
  void start() const {
    store_tile<T>();
    tile_zero<T>();
  }

  void stored() {
    if (full_) {
      while (added_ < adding_.tiles) add_tile();
      adding_ = in_tiles_;
      added_ = 0;
    }
    in_tiles_.tiles = 0;
    full_ = false;
  }

  void add_tile() {
    adding_.count == 2 ? add_tile<2>(added_) : add_tile<1>(added_);
    if (++added_ < adding_.tiles) return;
    const Run& run = adding_.run;
    if (!run.finishes || adding_.first + adding_.count < run.groups) return;
    const float* parts[kParts];
    parts[0] = run.gate;
    parts[kParts - 1] = run.sums;
    finish_.write(parts, run.rows, run.block / kParts);
  }

  template <int kCount>
  void add_tile(int t) const {
    const Run& run = adding_.run;
    const int64_t group = run.first_group + adding_.first;
    Vec scale[kCount], less[kCount];
    for (int g = 0; g < kCount; ++g) {
      scale[g] = weight_.scale(run.block, group + g, t % 2);
      if constexpr (kZeros) less[g] = weight_.negative_zero(run.block, group + g, t % 2);
    }
    const float* const inputs = (t / 2 ? run.inputs1 : run.inputs0) + adding_.first * kTileRows;
    const float* const products = adding_.products + t * kTileRows * kLanes;
    float* const sums = run.sums + t * kTileRows * kLanes;
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      Vec total = group == 0 ? zero() : load(sums + r * kLanes);
      for (int g = 0; g < kCount; ++g) {
        Vec fresh = load(products + g * kPairSums + r * kLanes);
        if constexpr (kZeros) fresh = fma(less[g], set(inputs[g * kTileRows + r]), fresh);
        total = fma(fresh, scale[g], total);
      }
      store(sums + r * kLanes, total);
    }
  }

  const Format& weight_;
  const Finish& finish_;
  alignas(64) float fresh_[2][2][kPairSums];
  int turn_ = 0;
  Groups in_tiles_{}, adding_{};
  float* to_ = nullptr;
  bool full_ = false;  // what is in the tiles is the last of its groups
  int added_ = 0;      // tiles
};

// As multiply_band of gemm_amx.h; `rows` in panels of GroupedBlocking.
template <int kParts, bool kZeros, class Format, class Finish>
static void multiply_grouped_band(const PackedRows& rows, Range stripe, const Format& weight, Range band, int64_t m,
                                  const GroupedMemory& memory, const Finish& finish) {
  const int64_t pairs = blocks(stripe.end - stripe.begin, 2), panels = blocks(rows.k_tiles, rows.panel);
  using Products = GroupedProducts<kParts, kZeros, Format, Finish>;
  using Next = typename Products::Next;
  Products products(weight, finish);
  // The panels of blocks in turn; each is expanded while the one before is multiplied for the last time.
  const int64_t band_blocks = band.end - band.begin, turns = panels * band_blocks;
  const auto turn = [&](int64_t i) -> Next {
    if (i == turns) return {};
    const auto values = [&](int64_t i) {
      return weight.tile(band.begin + i % band_blocks, i / band_blocks * rows.panel);
    };
    return {values(i), values(std::min(i + 1, turns - 1)), rows.panel_tiles(i / band_blocks)};
  };
  const Next first = turn(0);
  for (int64_t tile = 0; tile < first.tiles; ++tile) Products::expand(first, tile, memory.expanded);
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
      const auto sums_of = [&](int64_t b, int64_t pair) {
        return memory.sums + ((b - band.begin) * pairs + pair) * kPairSums;
      };
      const bool last = panel + 1 == panels && block % kParts == kParts - 1;
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t tile = stripe.begin + pair * 2;
        const char* const rows0 = rows.tiles(panel, tile);
        const float* const inputs0 = memory.group_sums + pair * 2 * groups * kTileRows;
        const Range range{tile * kTileRows, std::min({(tile + 2) * kTileRows, stripe.end * kTileRows, m})};
        const typename Products::Run run{rows0,
                                         rows0 + k_tiles * kTileBytes,
                                         block,
                                         first_group,
                                         groups,
                                         k_tiles,
                                         inputs0,
                                         inputs0 + groups * kTileRows,
                                         sums_of(block, pair),
                                         range,
                                         kParts == 2 && last ? sums_of(block - 1, pair) : nullptr,
                                         last};
        const Next next = pair + 1 < pairs ? Next{} : turn(panel * band_blocks + block - band.begin + 1);
        if (tile + 1 < stripe.end) {
          products.template multiply<2>(run, memory.expanded, next);
        } else {
          products.template multiply<1>(run, memory.expanded, next);
        }
      }
    }
    if (kZeros) products.complete();  // before the sums of its inputs make room for the next panel's
  }
  products.complete();
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
