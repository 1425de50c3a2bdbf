// Fused MoE with block-scaled weights in AMX tiles. silu(gate) * up is rounded once, to bf16.
#ifndef TR_RUNG
#include <array>

#include "moe/experts.h"
#include "block_scaled/block_scaled.h"
#define TR_ONLY_AMX
#define TR_SOURCE "moe/moe_block_scaled_amx.cpp"
#include "simd/foreach_isa.h"
#else
#include "moe/experts_rows-inl.h"
#include "block_scaled/block_scaled_amx-inl.h"
#include "block_scaled/block_scaled_stream_amx-inl.h"

namespace tilerank::TR_RUNG {

// The products of this many rows take as long as reading the weight from memory.
constexpr int64_t kMemoryBoundRows = 64;

// Writes silu(gate) * up into the tiles that the down projection reads.
struct BlockScaledGatedFinish {
  const PackedRows& to;
  int64_t first_tile;  // first row tile in `to`
  int64_t first;       // the expert's first result

  void prefetch(Range, int64_t) const {}
  void write(const float* const (&parts)[2], Range rows, int64_t result) const {
    const int64_t block = result - first;
    char* const column = to.tiles(block / to.panel, 0) + block % to.panel * kTileBytes;
    const int64_t tile_stride = to.panel_tiles(block / to.panel) * kTileBytes;
    for_sums(rows, [&](int64_t row, int64_t i) {
      bf16* const out =
          reinterpret_cast<bf16*>(column + (first_tile + row / kTileRows) * tile_stride) + row % kTileRows * kTileK;
      for (const int64_t half : {0, 1}) {
        const int64_t at = i + half * kTileRows * kLanes;
        store(out + half * kLanes, silu(load(parts[0] + at)) * load(parts[1] + at));
      }
    });
  }
};

// Writes the output of each (token, choice) pair to expert_out.
struct BlockScaledChoiceFinish {
  const Tensor& expert_out;
  const int32_t* pairs;
  int64_t first;  // the expert's first result

  float* at(int64_t row, int64_t result) const {
    return expert_out.row<float>(pairs[row]) + (result - first) * kBlockN;
  }
  void prefetch(Range, int64_t) const {}
  void write(const float* const (&parts)[1], Range rows, int64_t result) const {
    for_sums(rows, [&](int64_t row, int64_t i) {
      store(at(row, result), load(parts[0] + i));
      store(at(row, result) + kLanes, load(parts[0] + i + kTileRows * kLanes));
    });
  }
};

// One projection of all experts, with a thread's scratch memory for it.
template <int kParts, class Format>
struct BlockScaledProjection {
  const Format& weight;
  const int64_t results, k;  // results and inputs of one expert
  void* const memory;

  int64_t k_tiles() const { return blocks(k, kTileK); }
  size_t bytes() const {
    const size_t k_block_sums = static_cast<size_t>(weight.k_blocks * kTileRows) * sizeof(float);
    return std::max(k_block_sums, BlockScaledTileScratch::bytes(BlockScaledBlocking::panel(weight)));
  }
  // Returns PackedRows for a batch of this number of row tiles.
  PackedRows packed(char* data, int64_t row_tiles) const {
    return {data, row_tiles, k_tiles(), row_tiles == 1 ? k_tiles() : BlockScaledBlocking::panel(weight)};
  }

  // Multiplies at most 16 rows with results `own` of an expert. rows_in(memory for sums over K-blocks) returns FewRows.
  template <class Rows, class Finish>
  void few(const Rows& rows_in, int64_t expert, Range own, int64_t after, const Finish& finish) const {
    const int64_t first = expert * results;
    const Range own_blocks{(first + own.begin) * kParts, (first + own.end) * kParts};
    ExpandedPairs<Format> expanded(weight, own_blocks, k_tiles(), after);
    const FewRows rows = rows_in(static_cast<float*>(memory));
    const Tiles tiles(block_scaled_stream_tiles(rows.m));
    stream_block_scaled<kParts>(rows, weight, own_blocks, expanded, finish);
  }

  template <class Finish>
  void many(const PackedRows& packed, Range stripe, int64_t m, int64_t expert, Range own, const Finish& finish) const {
    const Tiles tiles(panel_tiles(kTileRows));
    const BlockScaledTileScratch working(memory, packed.panel);
    const int64_t end = (expert * results + own.end) * kParts;
    for (int64_t block = (expert * results + own.begin) * kParts; block < end; block += BlockScaledBlocking::kBand) {
      const Range band{block, std::min(block + BlockScaledBlocking::kBand, end)};
      multiply_block_scaled_band<kParts>(packed, stripe, weight, band, m, working, finish);
    }
  }

  // Returns the block that this thread reads next if it continues after `batch`, or -1.
  int64_t after(const ExpertBatches& batches, const ExpertBatch& batch, Range own) const {
    const ExpertBatch* const next = &batch + 1;
    return own.end < results || next == batches.list + batches.count ? -1 : next->expert * results * kParts;
  }
};

// middle: the batches' PackedRows over the width, one after the other
template <class Format>
static void moe(const Args& args, Team& team) {
  constexpr int64_t kStripe = BlockScaledBlocking::kStripe;
  const ExpertsArgs a(args);
  const Format gate_up(a.gate_up), down(a.down);
  const size_t batches_bytes = ExpertBatches::bytes(a.ids, a.experts);
  const size_t row_bytes = static_cast<size_t>(kStripe * blocks(a.hidden, kTileK) * kTileBytes);
  const size_t working = std::max(BlockScaledProjection<2, Format>{gate_up, a.width_blocks, a.hidden, nullptr}.bytes(),
                                  BlockScaledProjection<1, Format>{down, a.hidden_blocks, a.width, nullptr}.bytes());
  char* const memory = static_cast<char*>(team.scratch(batches_bytes + row_bytes + working));
  const ExpertBatches batches(a.ids, a.experts, memory);
  const ExpertQueues queues(a, team);
  char* const row_memory = memory + batches_bytes;
  const BlockScaledProjection<2, Format> in{gate_up, a.width_blocks, a.hidden, row_memory + row_bytes};
  const BlockScaledProjection<1, Format> out{down, a.hidden_blocks, a.width, row_memory + row_bytes};
  const auto middle_of = [&](const ExpertBatch& batch) {
    return out.packed(a.middle.as<char>() + batch.row_tile * a.width_blocks * kTileBytes,
                      blocks(batch.rows, kTileRows));
  };

  batches.for_work(a.width_blocks, kMemoryBoundRows, queues.gate_up, team, [&](const ExpertBatch& batch, Range own) {
    const PackedRows middle = middle_of(batch);
    for (int64_t tile = 0; tile < middle.row_tiles; tile += kStripe) {
      const int32_t* const pairs = batches.order + batch.first + tile * kTileRows;
      const auto row = [&](int64_t i) { return a.x.row<const bf16>(pairs[i] / batches.top); };
      const BlockScaledGatedFinish finish{middle, tile, batch.expert * a.width_blocks};
      if (middle.row_tiles == 1) {
        const auto few = [&](float* sums) { return FewRows::pack(row, batch.rows, a.hidden, row_memory, sums); };
        in.few(few, batch.expert, own, in.after(batches, batch, own), finish);
        continue;
      }
      PackedRows rows = in.packed(row_memory, std::min(kStripe, middle.row_tiles - tile));
      rows.panel = BlockScaledBlocking::panel(gate_up);
      const int64_t m = std::min(rows.row_tiles * kTileRows, batch.rows - tile * kTileRows);
      for (int64_t i = 0; i < m; ++i) {
        pack_row(row(i), a.hidden, rows, i / kTileRows, i % kTileRows, {0, rows.k_tiles});
      }
      in.many(rows, {0, rows.row_tiles}, m, batch.expert, own, finish);
    }
  });
  team.barrier();
  batches.for_work(a.hidden_blocks, kMemoryBoundRows, queues.down, team, [&](const ExpertBatch& batch, Range own) {
    const PackedRows middle = middle_of(batch);
    const BlockScaledChoiceFinish finish{a.expert_out, batches.order + batch.first, batch.expert * a.hidden_blocks};
    if (middle.row_tiles == 1) {
      const auto few = [&](float* sums) {
        return FewRows{middle.data, 64, kTileBytes, batch.rows, middle.k_tiles, sums};
      };
      return out.few(few, batch.expert, own, out.after(batches, batch, own), finish);
    }
    for (int64_t tile = 0; tile < middle.row_tiles; tile += kStripe) {
      out.many(middle, {tile, std::min(tile + kStripe, middle.row_tiles)}, batch.rows, batch.expert, own, finish);
    }
  });
  team.barrier();
  sum_choices<bf16>(a, team);
}

TR_BLOCK_SCALED_KERNELS(moe)

}  // namespace tilerank::TR_RUNG
#endif
