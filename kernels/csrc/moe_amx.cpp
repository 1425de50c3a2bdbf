// Fused experts in AMX tiles.
#ifndef TR_RUNG
#include "experts.h"
#define TR_ONLY_AMX
#define TR_SOURCE "moe_amx.cpp"
#include "foreach_isa.h"
#else
#include "experts_rows.h"
#include "gemm_amx.h"

namespace tilerank::TR_RUNG {

// The products of this many rows take as long as reading the weight from memory.
constexpr int64_t kHiddenRows = 192;

// silu(gate) * up, into the tiles that the down projection reads.
struct GatedFinish {
  const PackedRows& to;
  int64_t first_tile;  // of `to`

  void write(const float* const (&parts)[2], Range rows, int64_t block) const {
    char* const column = to.tiles(block / to.panel, 0) + block % to.panel * kTileBytes;
    const int64_t tile_stride = to.panel_tiles(block / to.panel) * kTileBytes;
    for_sums(rows, [&](int64_t row, int64_t i) {
      bf16* const out =
          reinterpret_cast<bf16*>(column + (first_tile + row / kTileRows) * tile_stride) + row % kTileRows * kBlockK;
      store_gated(out, load(parts[0] + i), load(parts[1] + i));
      const int64_t right = i + kTileRows * kLanes;
      store_gated(out + kLanes, load(parts[0] + right), load(parts[1] + right));
    });
  }
};

// A choice's output, where its token will look for it.
struct ChoiceFinish {
  const Tensor& partial;
  const int32_t* pairs;

  float* at(int64_t row, int64_t block) const { return partial.row<float>(pairs[row]) + block * kBlockN; }
  void write(const float* const (&parts)[1], Range rows, int64_t block) const {
    for_sums(rows, [&](int64_t row, int64_t i) {
      store(at(row, block), load(parts[0] + i));
      store(at(row, block) + kLanes, load(parts[0] + i + kTileRows * kLanes));
    });
  }
};

// Of the products of a group's rows with some of its expert's blocks.
template <int kParts, class Finish>
static void multiply_blocks(const PackedRows& rows, Range stripe, int64_t m, const Blocking& blocking,
                            const char* weight, Range results, float* sums, const Finish& finish) {
  const int64_t band = std::max<int64_t>(blocking.band, kParts), end = results.end * kParts;
  for (int64_t block = results.begin * kParts; block < end; block += band) {
    multiply_band<Bf16Dot, kParts>(rows, stripe, weight, {block, std::min(block + band, end)}, m, sums, finish);
  }
}

// A thread's working memory: the most that any group wants.
struct MoeScratch {
  size_t grouping, sums = 0, rows = 0;

  MoeScratch(const ExpertsArgs& a, int64_t k_tiles) : grouping(Grouping::bytes(a.ids, a.experts)) {
    for (const int64_t row_tiles : {int64_t{1}, int64_t{1} << 30}) {
      const Blocking in = Blocking::of(row_tiles, k_tiles), middle = Blocking::of(row_tiles, a.width_blocks);
      sums = std::max<size_t>(sums, 4 * band_sums<2>({nullptr, 0, k_tiles, in.panel}, in));
      sums = std::max<size_t>(sums, 4 * band_sums<1>({nullptr, 0, a.width_blocks, middle.panel}, middle));
      rows = std::max<size_t>(rows, in.stripe * k_tiles * kTileBytes);
    }
  }
};

// middle: every expert's rows as PackedRows over the width, one after the other
static void moe_bf16(const Args& args, Team& team) {
  const ExpertsArgs a(args);
  const int64_t k_tiles = blocks(a.hidden, kBlockK);
  const MoeScratch sizes(a, k_tiles);
  char* const memory = static_cast<char*>(team.scratch(sizes.grouping + sizes.sums + sizes.rows));
  float* const sums = reinterpret_cast<float*>(memory + sizes.grouping);
  char* const row_memory = memory + sizes.grouping + sizes.sums;
  const Grouping grouping(a.ids, a.experts, memory);
  const auto middle_of = [&](const Group& group) {
    const int64_t row_tiles = blocks(group.rows, kTileRows);
    return PackedRows{a.middle.as<char>() + group.row_tile * a.width_blocks * kTileBytes, row_tiles, a.width_blocks,
                      Blocking::of(row_tiles, a.width_blocks).panel};
  };

  grouping.deal(a.width_blocks, kHiddenRows, team, [&](const Group& group, Range own) {
    const PackedRows middle = middle_of(group);
    const Blocking blocking = Blocking::of(middle.row_tiles, k_tiles);
    const char* const weight = a.gate_up->as<const char>() + group.expert * a.width_blocks * 2 * k_tiles * kBlockStep;
    const Tiles tiles(panel_tiles(group.rows));
    for (int64_t tile = 0; tile < middle.row_tiles; tile += blocking.stripe) {
      const PackedRows rows{row_memory, std::min(blocking.stripe, middle.row_tiles - tile), k_tiles, blocking.panel};
      const int32_t* const pairs = grouping.order + group.first + tile * kTileRows;
      const int64_t m = std::min(rows.row_tiles * kTileRows, group.rows - tile * kTileRows);
      for (int64_t i = 0; i < m; ++i) {
        const bf16* const from = a.x.row<const bf16>(pairs[i] / grouping.top);
        pack_row(from, a.hidden, rows, i / kTileRows, i % kTileRows, {0, k_tiles});
      }
      multiply_blocks<2>(rows, {0, rows.row_tiles}, m, blocking, weight, own, sums, GatedFinish{middle, tile});
    }
  });
  team.barrier();
  grouping.deal(a.hidden_blocks, kHiddenRows, team, [&](const Group& group, Range own) {
    const PackedRows middle = middle_of(group);
    const Blocking blocking = Blocking::of(middle.row_tiles, a.width_blocks);
    const char* const weight = a.down->as<const char>() + group.expert * a.hidden_blocks * a.width_blocks * kBlockStep;
    const Tiles tiles(panel_tiles(group.rows));
    for (int64_t tile = 0; tile < middle.row_tiles; tile += blocking.stripe) {
      const Range stripe{tile, std::min(tile + blocking.stripe, middle.row_tiles)};
      multiply_blocks<1>(middle, stripe, group.rows, blocking, weight, own, sums,
                         ChoiceFinish{a.partial, grouping.order + group.first});
    }
  });
  team.barrier();
  sum_choices<bf16>(a, team);
}
TR_KERNEL(moe_bf16)

}  // namespace tilerank::TR_RUNG
#endif
