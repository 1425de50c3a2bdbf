// The AMX micro-kernels of many rows for block-scaled weights (block_scaled.h).
#pragma once
#include "linear/gemm_amx-inl.h"
#include "block_scaled/block_scaled_formats-inl.h"

namespace tilerank::TR_RUNG {

// The products of a K-block are summed from zero, tile by tile, in order. Then total += scale * (that sum - zero *
// sum(x)), one fused multiply-add per K-block, in order of the K-blocks. Few rows and many rows do the same, so a row's
// bits do not depend on its batch.

// Returns the sum of the inputs of one row over `tiles` K-tiles.
static inline float sum_of_inputs(const char* row, int64_t tile_stride, int64_t tiles) {
  Two sums = {zero(), zero()};
  for (int64_t t = 0; t < tiles; ++t) sums = sums + load_pairs(reinterpret_cast<const bf16*>(row + t * tile_stride));
  return sum(sums.a + sums.b);
}

// Cache blocking of many rows. k is split into panels of whole K-blocks. The panel of a weight block is expanded once
// into the L1 cache and used by all rows of a stripe; the stripe's panel and its sums with a band of blocks stay in L2.
struct BlockScaledBlocking {
  static constexpr int64_t kStripe = 32, kBand = 12;  // row tiles; blocks

  template <class Format>
  static int64_t panel(const Format& weight) {
    constexpr int64_t kTiles = 8;
    return std::max<int64_t>(1, kTiles / weight.k_block_tiles) * weight.k_block_tiles;
  }
};

struct BlockScaledTileScratch {
  float* sums;          // [band][pairs of row tiles][kPairSums]
  bf16* expanded;       // [panel][2 tiles]
  float* k_block_sums;  // [row tiles of a stripe][k_blocks of a panel][16]

  static size_t bytes(int64_t panel) {
    constexpr int64_t kSums = BlockScaledBlocking::kStripe / 2 * BlockScaledBlocking::kBand * kPairSums;
    return kSums * sizeof(float) + panel * (kBlockStep + BlockScaledBlocking::kStripe * kTileRows * sizeof(float));
  }
  BlockScaledTileScratch(void* memory, int64_t panel) {
    sums = static_cast<float*>(memory);
    expanded =
        reinterpret_cast<bf16*>(sums + BlockScaledBlocking::kStripe / 2 * BlockScaledBlocking::kBand * kPairSums);
    k_block_sums = reinterpret_cast<float*>(expanded + panel * 2 * kTile);
  }
};

// Multiplies row tiles with a panel of a weight block, one after the other. The products of a K-block remain in the
// tiles; the next K-block stores each tile just before it reuses it. The products of one or two K-blocks at a time are
// scaled and added, tile by tile, while the next ones are multiplied.
template <int kParts, bool kZeros, class Format, class Finish>
class BlockScaledProducts {
 public:
  // One or two row tiles and a panel of a block.
  struct Run {
    const char *rows0, *rows1;
    int64_t block, first_k_block, k_blocks, tiles;
    const float *inputs0, *inputs1;  // sums of the inputs of a row tile, by K-block
    float* sums;
    Range rows;
    const float* gate;  // the gate sums, if these are the up sums of the same result
    bool finishes;
  };

  // The panel that is expanded in place of a panel that is multiplied for the last time (it has at most as many tiles),
  // and the panel after it, which is prefetched.
  struct Next {
    const char *values, *after;
    int64_t tiles = 0;
  };

  BlockScaledProducts(const Format& weight, const Finish& finish) : weight_(weight), finish_(finish) {}

  template <int kRowTiles>
  void multiply(const Run& run, bf16* expanded, const Next& next) {
    for (int64_t k_block = 0; k_block < run.k_blocks; ++k_block) {
      const int64_t begin = k_block * weight_.k_block_tiles, end = std::min(begin + weight_.k_block_tiles, run.tiles);
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
        for (int64_t i = 0; i < (weight_.k_block_tiles == 1 ? 2 : 1) && added_ < adding_.tiles; ++i) add_tile();
        if (first) stored();
        if (t < next.tiles) expand(next, t, expanded);
      }
      const int64_t pair = k_block / 2 * 2, count = std::min<int64_t>(2, run.k_blocks - pair);
      in_tiles_ = {run, pair, count, kRowTiles * 2, fresh_[turn_][0]};
      to_ = fresh_[turn_][k_block - pair];
      full_ = k_block - pair + 1 == count;
      if (full_) turn_ ^= 1;
    }
  }

  static void expand(const Next& next, int64_t tile, bf16* to) {
    for (int64_t half = tile * 2; half < tile * 2 + 2; ++half) {
      for (int64_t i = 0; i < Format::kPackedTile; i += 64) prefetch_l2(next.after + half * Format::kPackedTile + i);
      Format::expand(next.values + half * Format::kPackedTile, to + half * kTile);
    }
  }

  // Stores what is still in the tiles and adds what is still pending.
  void complete() {
    store_tile<0>();
    store_tile<1>();
    store_tile<2>();
    store_tile<3>();
    stored();
    while (added_ < adding_.tiles) add_tile();
  }

 private:
  // One or two K-blocks of a run.
  struct KBlocks {
    Run run;
    int64_t first, count;
    int tiles = 0;  // tiles of sums
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
    if (!run.finishes || adding_.first + adding_.count < run.k_blocks) return;
    const float* parts[kParts];
    parts[0] = run.gate;
    parts[kParts - 1] = run.sums;
    finish_.write(parts, run.rows, run.block / kParts);
  }

  template <int kCount>
  void add_tile(int t) const {
    const Run& run = adding_.run;
    const int64_t k_block = run.first_k_block + adding_.first;
    Vec scale[kCount], less[kCount];
    for (int g = 0; g < kCount; ++g) {
      scale[g] = weight_.scale(run.block, k_block + g, t % 2);
      if constexpr (kZeros) less[g] = weight_.negative_zero(run.block, k_block + g, t % 2);
    }
    const float* const inputs = (t / 2 ? run.inputs1 : run.inputs0) + adding_.first * kTileRows;
    const float* const products = adding_.products + t * kTileRows * kLanes;
    float* const sums = run.sums + t * kTileRows * kLanes;
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      Vec total = k_block == 0 ? zero() : load(sums + r * kLanes);
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
  KBlocks in_tiles_{}, adding_{};
  float* to_ = nullptr;
  bool full_ = false;  // the tiles hold the last of the K-blocks
  int added_ = 0;      // tiles added
};

// multiply_band of gemm_amx-inl.h for block-scaled weights; the panels of `rows` are those of BlockScaledBlocking.
template <int kParts, bool kZeros, class Format, class Finish>
static void multiply_block_scaled_band(const PackedRows& rows, Range stripe, const Format& weight, Range band,
                                       int64_t m, const BlockScaledTileScratch& memory, const Finish& finish) {
  const int64_t pairs = blocks(stripe.end - stripe.begin, 2), panels = blocks(rows.k_tiles, rows.panel);
  using Products = BlockScaledProducts<kParts, kZeros, Format, Finish>;
  using Next = typename Products::Next;
  Products products(weight, finish);
  // The panels of all blocks, in turn. Each is expanded while the one before it is multiplied for the last time.
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
    const int64_t k_tiles = rows.panel_tiles(panel), k_blocks = blocks(k_tiles, weight.k_block_tiles);
    const int64_t first_tile = panel * rows.panel, first_k_block = first_tile / weight.k_block_tiles;
    if constexpr (kZeros) {
      for (int64_t tile = stripe.begin; tile < stripe.end; ++tile) {
        for (int64_t k_block = 0; k_block < k_blocks; ++k_block) {
          const int64_t first = k_block * weight.k_block_tiles, tiles = std::min(weight.k_block_tiles, k_tiles - first);
          for (int64_t r = 0; r < kTileRows; ++r) {
            memory.k_block_sums[((tile - stripe.begin) * k_blocks + k_block) * kTileRows + r] =
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
        const float* const inputs0 = memory.k_block_sums + pair * 2 * k_blocks * kTileRows;
        const Range range{tile * kTileRows, std::min({(tile + 2) * kTileRows, stripe.end * kTileRows, m})};
        const typename Products::Run run{rows0,
                                         rows0 + k_tiles * kTileBytes,
                                         block,
                                         first_k_block,
                                         k_blocks,
                                         k_tiles,
                                         inputs0,
                                         inputs0 + k_blocks * kTileRows,
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
    if (kZeros) products.complete();  // before the next panel overwrites the sums of its inputs
  }
  products.complete();
}

// Multiplies a stripe of rows with the blocks of `results`, in bands; finish as in multiply_stripe.
template <int kParts, class Format, class Finish>
static void multiply_block_scaled_stripe(const PackedRows& rows, Range stripe, const Format& weight, Range results,
                                         int64_t m, const BlockScaledTileScratch& memory, const Finish& finish) {
  const int64_t end = results.end * kParts;
  for (int64_t block = results.begin * kParts; block < end; block += BlockScaledBlocking::kBand) {
    const Range band{block, std::min(block + BlockScaledBlocking::kBand, end)};
    if constexpr (Format::kMayHaveZeros) {
      if (weight.has_zeros()) {
        multiply_block_scaled_band<kParts, true>(rows, stripe, weight, band, m, memory, finish);
        continue;
      }
    }
    multiply_block_scaled_band<kParts, false>(rows, stripe, weight, band, m, memory, finish);
  }
}

}  // namespace tilerank::TR_RUNG
