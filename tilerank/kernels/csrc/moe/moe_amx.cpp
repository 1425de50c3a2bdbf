// Fused MoE with bf16 weights in AMX tiles.
#ifndef TR_RUNG
#include "moe/experts.h"
#define TR_ONLY_AMX
#define TR_SOURCE "moe/moe_amx.cpp"
#include "simd/foreach_isa.h"
#else
#include "moe/experts_rows-inl.h"
#include "linear/gemm_amx-inl.h"
#include "linear/stream_rows_amx-inl.h"

namespace tilerank::TR_RUNG {

// The products of this many rows take as long as reading the weight from memory.
constexpr int64_t kMemoryBoundRows = 192;

// Writes silu(gate) * up into the tiles that the down projection reads. Non-temporal stores, here and below: ordinary
// stores would first read each line and compete with the stream of the weight.
struct GatedFinish {
  const PackedRows& to;
  int64_t first_tile;  // first row tile in `to`

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

// Writes the output of each (token, choice) pair to expert_out.
struct ChoiceFinish {
  const Tensor& expert_out;
  const int32_t* pairs;

  void write(const float* const (&parts)[1], Range rows, int64_t block) const {
    for_sums(rows, [&](int64_t row, int64_t i) {
      float* const out = expert_out.row<float>(pairs[row]) + block * kBlockN;
      _mm512_stream_ps(out, load(parts[0] + i).v);
      _mm512_stream_ps(out + kLanes, load(parts[0] + i + kTileRows * kLanes).v);
    });
  }
};

// The sizes of a thread's scratch memory, sufficient for any batch.
struct MoeScratch {
  size_t batches, sums = 4 * streamed_sums<2>(), rows;

  MoeScratch(const ExpertsArgs& a, int64_t k_tiles) : batches(ExpertBatches::bytes(a.ids, a.experts)) {
    constexpr int64_t kMany = int64_t{1} << 30;
    const Blocking in = Blocking::of(kMany, k_tiles), middle = Blocking::of(kMany, a.width_blocks);
    sums = std::max<size_t>(sums, 4 * band_sums<2>({nullptr, 0, k_tiles, in.panel}, in));
    sums = std::max<size_t>(sums, 4 * band_sums<1>({nullptr, 0, a.width_blocks, middle.panel}, middle));
    rows = std::max(in.stripe, kTilesAtOnce) * k_tiles * kTileBytes;
  }
};

// The two projections of a batch. Few rows are multiplied while the weight streams from memory; many rows use cache
// blocking. middle: the batches' PackedRows over the width, one after the other; few rows form one panel.
class Bf16Experts {
 public:
  Bf16Experts(const ExpertsArgs& args, const ExpertBatches& batches, float* sums_memory, char* row_memory)
      : a_(args), batches_(batches), k_tiles_(blocks(args.hidden, kTileK)), sums_(sums_memory), rows_(row_memory) {}

  void gate_up(const ExpertBatch& batch, Range own) const {
    const char* const weight =
        a_.gate_up->as<const char>() + batch.expert * a_.width_blocks * 2 * k_tiles_ * kBlockStep;
    const PackedRows middle = middle_of(batch);
    if (few(batch)) {
      const PackedRows rows{rows_, middle.row_tiles, k_tiles_, k_tiles_};
      pack(rows, batch, {0, batch.rows});
      return multiply_streamed<Bf16Dot, 2>(rows, batch.rows, weight, own, sums_, GatedFinish{middle, 0});
    }
    const Blocking blocking = Blocking::of(middle.row_tiles, k_tiles_);
    const Tiles tiles(panel_tiles(kTileRows));
    for (int64_t tile = 0; tile < middle.row_tiles; tile += blocking.stripe) {
      const PackedRows rows{rows_, std::min(blocking.stripe, middle.row_tiles - tile), k_tiles_, blocking.panel};
      const int64_t first = tile * kTileRows, end = std::min(first + rows.row_tiles * kTileRows, batch.rows);
      pack(rows, batch, {first, end});
      multiply_stripe<Bf16Dot, 2>(rows, {0, rows.row_tiles}, weight, own, blocking, end - first, sums_,
                                  GatedFinish{middle, tile});
    }
  }

  void down(const ExpertBatch& batch, Range own) const {
    const char* const weight =
        a_.down->as<const char>() + batch.expert * a_.hidden_blocks * a_.width_blocks * kBlockStep;
    const PackedRows middle = middle_of(batch);
    const ChoiceFinish finish{a_.expert_out, batches_.order + batch.first};
    if (few(batch)) {
      return multiply_streamed<Bf16Dot, 1>(middle, batch.rows, weight, own, sums_, finish);
    }
    const Blocking blocking = Blocking::of(middle.row_tiles, a_.width_blocks);
    const Tiles tiles(panel_tiles(kTileRows));
    for (int64_t tile = 0; tile < middle.row_tiles; tile += blocking.stripe) {
      const Range stripe{tile, std::min(tile + blocking.stripe, middle.row_tiles)};
      multiply_stripe<Bf16Dot, 1>(middle, stripe, weight, own, blocking, batch.rows, sums_, finish);
    }
  }

 private:
  static bool few(const ExpertBatch& batch) { return batch.rows <= kTilesAtOnce * kTileRows; }

  PackedRows middle_of(const ExpertBatch& batch) const {
    const int64_t row_tiles = blocks(batch.rows, kTileRows);
    return {a_.middle.as<char>() + batch.row_tile * a_.width_blocks * kTileBytes, row_tiles, a_.width_blocks,
            few(batch) ? a_.width_blocks : Blocking::of(row_tiles, a_.width_blocks).panel};
  }

  // Packs rows `from` of a batch, several side by side, which reads them faster than one after the other.
  void pack(const PackedRows& rows, const ExpertBatch& batch, Range from) const {
    constexpr int64_t kRowsAtOnce = 8, kTilesAtOnce = 2;
    for (int64_t first = from.begin; first < from.end; first += kRowsAtOnce) {
      const int64_t end = std::min(first + kRowsAtOnce, from.end);
      const bf16* inputs[kRowsAtOnce];
      for (int64_t i = first; i < end; ++i) {
        inputs[i - first] = a_.x.row<const bf16>(batches_.order[batch.first + i] / batches_.top);
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
  const ExpertBatches& batches_;
  const int64_t k_tiles_;
  float* const sums_;
  char* const rows_;
};

static void moe_bf16(const Args& args, Team& team) {
  const ExpertsArgs a(args);
  const MoeScratch sizes(a, blocks(a.hidden, kTileK));
  char* const memory = static_cast<char*>(team.scratch(sizes.batches + sizes.sums + sizes.rows));
  const ExpertBatches batches(a.ids, a.experts, memory);
  const ExpertQueues queues(a, team);
  char* const sums = memory + sizes.batches;
  const Bf16Experts experts(a, batches, reinterpret_cast<float*>(sums), sums + sizes.sums);
  batches.for_work(a.width_blocks, kMemoryBoundRows, queues.gate_up, team,
                   [&](const ExpertBatch& batch, Range own) { experts.gate_up(batch, own); });
  _mm_sfence();
  team.barrier();
  batches.for_work(a.hidden_blocks, kMemoryBoundRows, queues.down, team,
                   [&](const ExpertBatch& batch, Range own) { experts.down(batch, own); });
  _mm_sfence();
  team.barrier();
  sum_choices<bf16>(a, team);
}
TR_KERNEL(moe_bf16)

}  // namespace tilerank::TR_RUNG
#endif
