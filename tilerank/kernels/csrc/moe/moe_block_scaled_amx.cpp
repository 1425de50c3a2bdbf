// Fused MoE with block-scaled weights in AMX tiles. silu(gate) * up is rounded once, to bf16.
#ifndef TR_RUNG
#include <array>

#include "moe/experts.h"
#include "block_scaled/block_scaled.h"
#define TR_ONLY_AMX
#define TR_SOURCE "moe/moe_block_scaled_amx.cpp"
#include "simd/foreach_isa.h"
#else
#include "simd/blocks-inl.h"
#include "moe/experts-inl.h"
#include "block_scaled/block_scaled_amx-inl.h"
#include "linear/finish_amx-inl.h"
#include "block_scaled/block_scaled_stream_amx-inl.h"
#include "moe/experts_amx-inl.h"

namespace tilerank::TR_RUNG {

// memory: the rows of a stripe, then sums.
template <class Format, int kParts>
class BlockScaledTileProduct {
 public:
  using Weight = typename Format::Weight;
  using Arguments = ExpertsArgs<Weight>;
  static constexpr int64_t kMemoryBoundRows = 64;

  static size_t bytes(const Arguments& a) {
    const auto sums = [](const Weight& w) {
      const Format weight(w);
      return std::max(static_cast<size_t>(weight.k_blocks * kTileRows) * sizeof(float),
                      BlockScaledTileScratch::bytes(BlockScaledBlocking::panel(weight)));
    };
    return row_bytes(a) + std::max(sums(a.gate_up), sums(a.down));
  }
  BlockScaledTileProduct(const Arguments& a, const Weight& w, int64_t results, int64_t k, char* memory)
      : weights_(w),
        results_(results),
        k_(k),
        k_tiles_(blocks(k, kTileK)),
        many_panel_(BlockScaledBlocking::panel(Format(w))),
        rows_(memory),
        sums_(memory + row_bytes(a)) {}

  int64_t stripe(int64_t) const { return BlockScaledBlocking::kStripe; }
  int64_t panel(int64_t row_tiles) const { return row_tiles == 1 ? k_tiles_ : many_panel_; }

  template <class Row, class To>
  void multiply_rows(const Row& row, int64_t m, const ExpertBatch& batch, Range own, const ExpertBatches& batches,
                     const To& to) const {
    if (batch.rows <= kTileRows) {
      return stream(batch, own, batches, to,
                    [&](float* k_block_sums) { return FewRows::pack(row, m, k_, rows_, k_block_sums); });
    }
    const PackedRows rows{rows_, blocks(m, kTileRows), k_tiles_, many_panel_};
    pack_rows(row, m, k_, rows);
    multiply(rows, {0, rows.row_tiles}, m, batch, own, to);
  }

  template <class To>
  void multiply_tiles(const PackedRows& rows, Range stripe, const ExpertBatch& batch, Range own,
                      const ExpertBatches& batches, const To& to) const {
    if (batch.rows <= kTileRows) {
      return stream(batch, own, batches, to, [&](float* k_block_sums) {
        return FewRows{rows.data, 64, kTileBytes, batch.rows, k_tiles_, k_block_sums};
      });
    }
    multiply(rows, stripe, batch.rows, batch, own, to);
  }

 private:
  static size_t row_bytes(const Arguments& a) {
    return static_cast<size_t>(BlockScaledBlocking::kStripe * blocks(a.hidden, kTileK) * kTileBytes);
  }
  Format weight_of(const ExpertBatch& batch) const { return Format(weights_.from(batch.expert * results_ * kParts)); }

  // At most 16 rows. The first part of the weight is prefetched while rows_in(memory for sums over K-blocks) makes
  // FewRows.
  template <class To, class Rows>
  void stream(const ExpertBatch& batch, Range own, const ExpertBatches& batches, const To& to,
              const Rows& rows_in) const {
    const Format weight = weight_of(batch);
    const Range own_blocks{own.begin * kParts, own.end * kParts};
    // The block that this thread reads next if it continues after this batch, or -1.
    const ExpertBatch* const next = &batch + 1;
    const bool ends = own.end < results_ || next == batches.list + batches.count;
    const int64_t after = ends ? -1 : (next->expert - batch.expert) * results_ * kParts;
    ExpandedPairs<Format> expanded(weight, own_blocks, k_tiles_, after);
    const FewRows rows = rows_in(reinterpret_cast<float*>(sums_));
    const Tiles tiles(block_scaled_stream_tiles(rows.m));
    stream_block_scaled<kParts>(rows, weight, own_blocks, expanded, ProductFinish<kParts, To>{to});
  }

  template <class To>
  void multiply(const PackedRows& rows, Range stripe, int64_t m, const ExpertBatch& batch, Range own,
                const To& to) const {
    const Tiles tiles(panel_tiles(kTileRows));
    multiply_block_scaled_stripe<kParts>(rows, stripe, weight_of(batch), own, m,
                                         BlockScaledTileScratch(sums_, rows.panel), ProductFinish<kParts, To>{to});
  }

  const Weight& weights_;  // of all experts
  const int64_t results_, k_, k_tiles_, many_panel_;
  char *const rows_, *const sums_;
};

template <class Format>
struct Of {
  template <int kParts>
  using Product = BlockScaledTileProduct<Format, kParts>;
};

TR_MOE(int4, OutputScaledWeight, TileExperts<Of<Int4>::Product, float, false>)
TR_MOE(mxfp4, OutputScaledWeight, TileExperts<Of<Mxfp4>::Product, float, false>)
TR_MOE(fp8, ByteCodesWeight, TileExperts<Of<Fp8>::Product, float, false>)
TR_MOE(block_int8, ByteCodesWeight, TileExperts<Of<BlockInt8>::Product, float, false>)
TR_MOE(channel_fp8, OutputScaledWeight, TileExperts<Of<ChannelFp8>::Product, float, false>)
TR_MOE(group_int8, OutputScaledWeight, TileExperts<Of<GroupInt8>::Product, float, false>)

}  // namespace tilerank::TR_RUNG
#endif
