// Fused MoE with bf16 weights in AMX tiles.
#ifndef TR_RUNG
#include <array>

#include "moe/experts.h"
#define TR_ONLY_AMX
#define TR_SOURCE "moe/moe_amx.cpp"
#include "simd/foreach_isa.h"
#else
#include "simd/blocks-inl.h"
#include "moe/experts-inl.h"
#include "linear/gemm_amx-inl.h"
#include "linear/finish_amx-inl.h"
#include "linear/stream_rows_amx-inl.h"
#include "moe/experts_amx-inl.h"

namespace tilerank::TR_RUNG {

// Few rows are multiplied while the weight streams from memory; many rows use cache blocking. memory: sums, then the
// rows of a stripe.
template <int kParts>
class Bf16TileProduct {
 public:
  using Weight = FloatWeight;
  using Arguments = ExpertsArgs<Weight>;
  static constexpr int64_t kMemoryBoundRows = 192;

  static size_t bytes(const Arguments& a) {
    const int64_t k_tiles = blocks(a.hidden, kTileK);
    return sums_bytes(a) + std::max(Blocking::of(kMany, k_tiles).stripe, kTilesAtOnce) * k_tiles * kTileBytes;
  }
  Bf16TileProduct(const Arguments& a, const Weight& w, int64_t results, int64_t k, char* memory)
      : weight_(w.data.as<const char>()),
        results_(results),
        k_(k),
        k_tiles_(blocks(k, kTileK)),
        sums_(reinterpret_cast<float*>(memory)),
        rows_(memory + sums_bytes(a)) {}

  int64_t stripe(int64_t row_tiles) const { return blocking(row_tiles).stripe; }
  int64_t panel(int64_t row_tiles) const { return blocking(row_tiles).panel; }

  template <class Row, class To>
  void multiply_rows(const Row& row, int64_t m, const ExpertBatch& batch, Range own, const ExpertBatches&,
                     const To& to) const {
    const PackedRows rows{rows_, blocks(m, kTileRows), k_tiles_, panel(blocks(batch.rows, kTileRows))};
    pack_rows(row, m, k_, rows);
    multiply(rows, {0, rows.row_tiles}, m, batch, own, to);
  }

  template <class To>
  void multiply_tiles(const PackedRows& rows, Range stripe, const ExpertBatch& batch, Range own, const ExpertBatches&,
                      const To& to) const {
    multiply(rows, stripe, batch.rows, batch, own, to);
  }

 private:
  static constexpr int64_t kMany = int64_t{1} << 30;

  static bool few(int64_t row_tiles) { return row_tiles <= kTilesAtOnce; }
  Blocking blocking(int64_t row_tiles) const {
    return few(row_tiles) ? Blocking{k_tiles_, kTilesAtOnce, 1} : Blocking::of(row_tiles, k_tiles_);
  }

  // Sufficient for both projections and any batch.
  static size_t sums_bytes(const Arguments& a) {
    const auto many = [](auto parts, int64_t k_tiles) {
      const Blocking blocking = Blocking::of(kMany, k_tiles);
      return band_sums<parts>({nullptr, 0, k_tiles, blocking.panel}, blocking);
    };
    return 4 * static_cast<size_t>(
                   std::max({streamed_sums<2>(), many(std::integral_constant<int, 2>(), blocks(a.hidden, kTileK)),
                             many(std::integral_constant<int, 1>(), a.width_blocks)}));
  }

  template <class To>
  void multiply(const PackedRows& rows, Range stripe, int64_t m, const ExpertBatch& batch, Range own,
                const To& to) const {
    const char* const weight = weight_ + batch.expert * results_ * kParts * k_tiles_ * kBlockStep;
    const ProductFinish<kParts, To> finish{to};
    const int64_t row_tiles = blocks(batch.rows, kTileRows);
    if (few(row_tiles)) return multiply_streamed<Bf16Dot, kParts>(rows, m, weight, own, sums_, finish);
    const Tiles tiles(panel_tiles(kTileRows));
    multiply_stripe<Bf16Dot, kParts>(rows, stripe, weight, own, blocking(row_tiles), m, sums_, finish);
  }

  const char* const weight_;
  const int64_t results_, k_, k_tiles_;
  float* const sums_;
  char* const rows_;
};

// Non-temporal stores: ordinary stores would first read each line and compete with the stream of the weight.
TR_MOE(bf16, FloatWeight, TileExperts<Bf16TileProduct, bf16, true>)

}  // namespace tilerank::TR_RUNG
#endif
