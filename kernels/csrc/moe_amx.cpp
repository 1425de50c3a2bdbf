// Fused experts in AMX tiles.
#ifndef TR_RUNG
#include "experts.h"
#define TR_ONLY_AMX
#define TR_SOURCE "moe_amx.cpp"
#include "foreach_isa.h"
#else
#include "experts_rows.h"
#include "gemm_amx.h"
#include "stream_rows_amx.h"

namespace tilerank::TR_RUNG {

// The products of this many rows take as long as reading the weight from memory.
constexpr int64_t kHiddenRows = 192;

// silu(gate) * up, into the tiles that the down projection reads. Past the caches, which would read them first, here
// and below: what waits for that is not there to wait for the weight.
struct GatedFinish {
  const PackedRows& to;
  int64_t first_tile;  // of `to`

  void write(const float* const (&parts)[2], Range rows, int64_t block) const {
    char* const column = to.tiles(block / to.panel, 0) + block % to.panel * kTileBytes;
    const int64_t tile_stride = to.panel_tiles(block / to.panel) * kTileBytes;
    for_sums(rows, [&](int64_t row, int64_t i) {
      char* const out = column + (first_tile + row / kTileRows) * tile_stride + row % kTileRows * 64;
      const auto gated = [&](int64_t at) {
        return round_to<bf16>(silu(round_to<bf16>(load(parts[0] + at)))) * round_to<bf16>(load(parts[1] + at));
      };
      const Vec left = gated(i), right = gated(i + kTileRows * kLanes);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(out), (__m512i)_mm512_cvtne2ps_pbh(right.v, left.v));
    });
  }
};

// A choice's output, where its token will look for it.
struct ChoiceFinish {
  const Tensor& partial;
  const int32_t* pairs;

  void write(const float* const (&parts)[1], Range rows, int64_t block) const {
    for_sums(rows, [&](int64_t row, int64_t i) {
      float* const out = partial.row<float>(pairs[row]) + block * kBlockN;
      _mm512_stream_ps(out, load(parts[0] + i).v);
      _mm512_stream_ps(out + kLanes, load(parts[0] + i + kTileRows * kLanes).v);
    });
  }
};

// A thread's working memory: the most that any group wants.
struct MoeScratch {
  size_t grouping, sums = 4 * streamed_sums<2>(), rows;

  MoeScratch(const ExpertsArgs& a, int64_t k_tiles) : grouping(Grouping::bytes(a.ids, a.experts)) {
    constexpr int64_t kMany = int64_t{1} << 30;
    const Blocking in = Blocking::of(kMany, k_tiles), middle = Blocking::of(kMany, a.width_blocks);
    sums = std::max<size_t>(sums, 4 * band_sums<2>({nullptr, 0, k_tiles, in.panel}, in));
    sums = std::max<size_t>(sums, 4 * band_sums<1>({nullptr, 0, a.width_blocks, middle.panel}, middle));
    rows = std::max(in.stripe, kTilesAtOnce) * k_tiles * kTileBytes;
  }
};

// What a thread does with a group. Few rows are multiplied with a weight as it comes from memory, many are blocked.
// middle: every group's rows as PackedRows over the width, one after the other; of few in one panel.
class Bf16Experts {
 public:
  Bf16Experts(const ExpertsArgs& args, const Grouping& groups, float* sums_memory, char* row_memory)
      : a_(args), grouping_(groups), k_tiles_(blocks(args.hidden, kBlockK)), sums_(sums_memory), rows_(row_memory) {}

  void gate_up(const Group& group, Range own) const {
    const char* const weight =
        a_.gate_up->as<const char>() + group.expert * a_.width_blocks * 2 * k_tiles_ * kBlockStep;
    const PackedRows middle = middle_of(group);
    if (few(group)) {
      const PackedRows rows{rows_, middle.row_tiles, k_tiles_, k_tiles_};
      pack(rows, group, {0, group.rows});
      return multiply_streamed<Bf16Dot, 2>(rows, group.rows, weight, own, sums_, GatedFinish{middle, 0});
    }
    const Blocking blocking = Blocking::of(middle.row_tiles, k_tiles_);
    const Tiles tiles(panel_tiles(kTileRows));
    for (int64_t tile = 0; tile < middle.row_tiles; tile += blocking.stripe) {
      const PackedRows rows{rows_, std::min(blocking.stripe, middle.row_tiles - tile), k_tiles_, blocking.panel};
      const int64_t first = tile * kTileRows, end = std::min(first + rows.row_tiles * kTileRows, group.rows);
      pack(rows, group, {first, end});
      multiply_stripe<Bf16Dot, 2>(rows, {0, rows.row_tiles}, weight, own, blocking, end - first, sums_,
                                  GatedFinish{middle, tile});
    }
  }

  void down(const Group& group, Range own) const {
    const char* const weight =
        a_.down->as<const char>() + group.expert * a_.hidden_blocks * a_.width_blocks * kBlockStep;
    const PackedRows middle = middle_of(group);
    const ChoiceFinish finish{a_.partial, grouping_.order + group.first};
    if (few(group)) {
      return multiply_streamed<Bf16Dot, 1>(middle, group.rows, weight, own, sums_, finish);
    }
    const Blocking blocking = Blocking::of(middle.row_tiles, a_.width_blocks);
    const Tiles tiles(panel_tiles(kTileRows));
    for (int64_t tile = 0; tile < middle.row_tiles; tile += blocking.stripe) {
      const Range stripe{tile, std::min(tile + blocking.stripe, middle.row_tiles)};
      multiply_stripe<Bf16Dot, 1>(middle, stripe, weight, own, blocking, group.rows, sums_, finish);
    }
  }

 private:
  static bool few(const Group& group) { return group.rows <= kTilesAtOnce * kTileRows; }

  PackedRows middle_of(const Group& group) const {
    const int64_t row_tiles = blocks(group.rows, kTileRows);
    return {a_.middle.as<char>() + group.row_tile * a_.width_blocks * kTileBytes, row_tiles, a_.width_blocks,
            few(group) ? a_.width_blocks : Blocking::of(row_tiles, a_.width_blocks).panel};
  }

  // Rows `from` of a group, some side by side: they come faster from memory than one after the other.
  void pack(const PackedRows& rows, const Group& group, Range from) const {
    constexpr int64_t kRowsAtOnce = 8, kTilesAtOnce = 2;
    for (int64_t first = from.begin; first < from.end; first += kRowsAtOnce) {
      const int64_t end = std::min(first + kRowsAtOnce, from.end);
      const bf16* inputs[kRowsAtOnce];
      for (int64_t i = first; i < end; ++i) {
        inputs[i - first] = a_.x.row<const bf16>(grouping_.order[group.first + i] / grouping_.top);
      }
      for (int64_t tile = 0; tile < k_tiles_; tile += kTilesAtOnce) {
        for (int64_t i = first; i < end; ++i) {
          const int64_t row = i - from.begin;
          pack_row(inputs[i - first], a_.hidden, rows, row / kTileRows, row % kTileRows,
                   {tile, std::min(tile + kTilesAtOnce, k_tiles_)});
        }
      }
    }
  }

  const ExpertsArgs& a_;
  const Grouping& grouping_;
  const int64_t k_tiles_;
  float* const sums_;
  char* const rows_;
};

static void moe_bf16(const Args& args, Team& team) {
  const ExpertsArgs a(args);
  const MoeScratch sizes(a, blocks(a.hidden, kBlockK));
  char* const memory = static_cast<char*>(team.scratch(sizes.grouping + sizes.sums + sizes.rows));
  const Grouping grouping(a.ids, a.experts, memory);
  const ExpertsDeal deal(a, team);
  char* const sums = memory + sizes.grouping;
  const Bf16Experts experts(a, grouping, reinterpret_cast<float*>(sums), sums + sizes.sums);
  grouping.deal(a.width_blocks, kHiddenRows, deal.gate_up, team,
                [&](const Group& group, Range own) { experts.gate_up(group, own); });
  _mm_sfence();
  team.barrier();
  grouping.deal(a.hidden_blocks, kHiddenRows, deal.down, team,
                [&](const Group& group, Range own) { experts.down(group, own); });
  _mm_sfence();
  team.barrier();
  sum_choices<bf16>(a, team);
}
TR_KERNEL(moe_bf16)

}  // namespace tilerank::TR_RUNG
#endif
