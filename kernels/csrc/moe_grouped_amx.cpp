// Fused experts with int4 and fp8 weights in AMX tiles. silu(gate) * up is rounded once, to bf16.
#ifndef TR_RUNG
#include <array>

#include "experts.h"
#include "grouped.h"
#define TR_ONLY_AMX
#define TR_SOURCE "moe_grouped_amx.cpp"
#include "foreach_isa.h"
#else
#include "experts_rows.h"
#include "grouped_amx.h"
#include "grouped_stream_amx.h"

namespace tilerank::TR_RUNG {

// The products of this many rows take as long as reading the weight from memory.
constexpr int64_t kHiddenRows = 64;

// silu(gate) * up, into the tiles that the down projection reads.
struct GroupedGatedFinish {
  const PackedRows& to;
  int64_t first_tile;  // of `to`
  int64_t first;       // result: block of the width

  void prefetch(Range, int64_t) const {}
  void write(const float* const (&parts)[2], Range rows, int64_t result) const {
    const int64_t block = result - first;
    char* const column = to.tiles(block / to.panel, 0) + block % to.panel * kTileBytes;
    const int64_t tile_stride = to.panel_tiles(block / to.panel) * kTileBytes;
    for_sums(rows, [&](int64_t row, int64_t i) {
      bf16* const out =
          reinterpret_cast<bf16*>(column + (first_tile + row / kTileRows) * tile_stride) + row % kTileRows * kBlockK;
      for (const int64_t half : {0, 1}) {
        const int64_t at = i + half * kTileRows * kLanes;
        store(out + half * kLanes, silu(load(parts[0] + at)) * load(parts[1] + at));
      }
    });
  }
};

// A choice's output, where its token will look for it.
struct GroupedChoiceFinish {
  const Tensor& partial;
  const int32_t* pairs;
  int64_t first;  // result: block of the hidden size

  float* at(int64_t row, int64_t result) const { return partial.row<float>(pairs[row]) + (result - first) * kBlockN; }
  void prefetch(Range, int64_t) const {}
  void write(const float* const (&parts)[1], Range rows, int64_t result) const {
    for_sums(rows, [&](int64_t row, int64_t i) {
      store(at(row, result), load(parts[0] + i));
      store(at(row, result) + kLanes, load(parts[0] + i + kTileRows * kLanes));
    });
  }
};

// One of the projections of all experts, and a thread's memory for it.
template <int kParts, class Format>
struct GroupedProjection {
  const Format& weight;
  const int64_t results, k;  // of an expert, in blocks
  void* const memory;

  int64_t k_tiles() const { return blocks(k, kBlockK); }
  size_t bytes() const {
    const size_t group_sums = static_cast<size_t>(weight.groups * kTileRows) * sizeof(float);
    return std::max(group_sums, GroupedMemory::bytes(GroupedBlocking::panel(weight)));
  }
  // How a group's rows are packed.
  PackedRows packed(char* data, int64_t row_tiles) const {
    return {data, row_tiles, k_tiles(), row_tiles == 1 ? k_tiles() : GroupedBlocking::panel(weight)};
  }

  // At most 16 rows, which rows_in(memory for sums of groups) gives as FewRows, with results of expert `expert`.
  template <class Rows, class Finish>
  void few(const Rows& rows_in, int64_t expert, Range own, int64_t after, const Finish& finish) const {
    const int64_t first = expert * results;
    const Range own_blocks{(first + own.begin) * kParts, (first + own.end) * kParts};
    ExpandedPairs<Format> expanded(weight, own_blocks, k_tiles(), after);
    const FewRows rows = rows_in(static_cast<float*>(memory));
    const Tiles tiles(grouped_stream_tiles(rows.m));
    stream_grouped<kParts>(rows, weight, own_blocks, expanded, finish);
  }

  template <class Finish>
  void many(const PackedRows& packed, Range stripe, int64_t m, int64_t expert, Range own, const Finish& finish) const {
    const Tiles tiles(panel_tiles(kTileRows));
    const GroupedMemory working(memory, packed.panel);
    const int64_t end = (expert * results + own.end) * kParts;
    for (int64_t block = (expert * results + own.begin) * kParts; block < end; block += GroupedBlocking::kBand) {
      const Range band{block, std::min(block + GroupedBlocking::kBand, end)};
      multiply_grouped_band<kParts>(packed, stripe, weight, band, m, working, finish);
    }
  }

  // The block that a thread that goes on after `group` reads next, or none.
  int64_t after(const Grouping& grouping, const Group& group, Range own) const {
    const Group* const next = &group + 1;
    return own.end < results || next == grouping.groups + grouping.count ? -1 : next->expert * results * kParts;
  }
};

// middle: every expert's rows as PackedRows over the width, one after the other
template <class Format>
static void moe(const Args& args, Team& team) {
  constexpr int64_t kStripe = GroupedBlocking::kStripe;
  const ExpertsArgs a(args);
  const Format gate_up(a.gate_up), down(a.down);
  const size_t grouping_bytes = Grouping::bytes(a.ids, a.experts);
  const size_t row_bytes = static_cast<size_t>(kStripe * blocks(a.hidden, kBlockK) * kTileBytes);
  const size_t working = std::max(GroupedProjection<2, Format>{gate_up, a.width_blocks, a.hidden, nullptr}.bytes(),
                                  GroupedProjection<1, Format>{down, a.hidden_blocks, a.width, nullptr}.bytes());
  char* const memory = static_cast<char*>(team.scratch(grouping_bytes + row_bytes + working));
  const Grouping grouping(a.ids, a.experts, memory);
  const ExpertsDeal deal(a, team);
  char* const row_memory = memory + grouping_bytes;
  const GroupedProjection<2, Format> in{gate_up, a.width_blocks, a.hidden, row_memory + row_bytes};
  const GroupedProjection<1, Format> out{down, a.hidden_blocks, a.width, row_memory + row_bytes};
  const auto middle_of = [&](const Group& group) {
    return out.packed(a.middle.as<char>() + group.row_tile * a.width_blocks * kTileBytes,
                      blocks(group.rows, kTileRows));
  };

  grouping.deal(a.width_blocks, kHiddenRows, deal.gate_up, team, [&](const Group& group, Range own) {
    const PackedRows middle = middle_of(group);
    for (int64_t tile = 0; tile < middle.row_tiles; tile += kStripe) {
      const int32_t* const pairs = grouping.order + group.first + tile * kTileRows;
      const auto row = [&](int64_t i) { return a.x.row<const bf16>(pairs[i] / grouping.top); };
      const GroupedGatedFinish finish{middle, tile, group.expert * a.width_blocks};
      if (middle.row_tiles == 1) {
        const auto few = [&](float* sums) { return FewRows::pack(row, group.rows, a.hidden, row_memory, sums); };
        in.few(few, group.expert, own, in.after(grouping, group, own), finish);
        continue;
      }
      PackedRows rows = in.packed(row_memory, std::min(kStripe, middle.row_tiles - tile));
      rows.panel = GroupedBlocking::panel(gate_up);
      const int64_t m = std::min(rows.row_tiles * kTileRows, group.rows - tile * kTileRows);
      for (int64_t i = 0; i < m; ++i) {
        pack_row(row(i), a.hidden, rows, i / kTileRows, i % kTileRows, {0, rows.k_tiles});
      }
      in.many(rows, {0, rows.row_tiles}, m, group.expert, own, finish);
    }
  });
  team.barrier();
  grouping.deal(a.hidden_blocks, kHiddenRows, deal.down, team, [&](const Group& group, Range own) {
    const PackedRows middle = middle_of(group);
    const GroupedChoiceFinish finish{a.partial, grouping.order + group.first, group.expert * a.hidden_blocks};
    if (middle.row_tiles == 1) {
      const auto few = [&](float* sums) {
        return FewRows{middle.data, 64, kTileBytes, group.rows, middle.k_tiles, sums};
      };
      return out.few(few, group.expert, own, out.after(grouping, group, own), finish);
    }
    for (int64_t tile = 0; tile < middle.row_tiles; tile += kStripe) {
      out.many(middle, {tile, std::min(tile + kStripe, middle.row_tiles)}, group.rows, group.expert, own, finish);
    }
  });
  team.barrier();
  sum_choices<bf16>(a, team);
}

static void moe_int4(const Args& args, Team& team) { moe<Int4>(args, team); }
TR_KERNEL(moe_int4)

static void moe_fp8(const Args& args, Team& team) { moe<Fp8>(args, team); }
TR_KERNEL(moe_fp8)

}  // namespace tilerank::TR_RUNG
#endif
