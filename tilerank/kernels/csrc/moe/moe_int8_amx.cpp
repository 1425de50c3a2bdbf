// Fused MoE with int8 weights in AMX tiles.
#ifndef TR_RUNG
#include <array>

#include "moe/experts.h"
#include "linear/int8.h"
#define TR_ONLY_AMX
#define TR_SOURCE "moe/moe_int8_amx.cpp"
#include "simd/foreach_isa.h"
#else
#include "moe/experts_rows-inl.h"
#include "linear/gemm_amx-inl.h"
#include "linear/int8_rows-inl.h"
#include "linear/stream_amx-inl.h"
#include "linear/gemm_int8_amx-inl.h"

namespace tilerank::TR_RUNG {

// The products of this many rows take as long as reading the weight from memory.
constexpr int64_t kMemoryBoundRows = 192;

// Writes silu(gate) * up in fp32; it is quantised when its rows are complete.
struct Int8GatedFinish {
  const Tensor& middle;
  int64_t first;
  const float *row_scales, *scales;

  void write(const float* const (&parts)[2], Range rows, int64_t block) const {
    for_sums(rows, [&](int64_t row, int64_t i) {
      const auto gate = scaled_tiles(parts[0] + i, row_scales[row], scales + block * 2 * kBlockN);
      const auto up = scaled_tiles(parts[1] + i, row_scales[row], scales + (block * 2 + 1) * kBlockN);
      float* const out = middle.row<float>(first + row) + block * kBlockN;
      for (int v = 0; v < 2; ++v) store(out + v * kLanes, silu(gate[v]) * up[v]);
    });
  }
};

// Writes the output of each (token, choice) pair to expert_out.
struct Int8ChoiceFinish {
  const Tensor& expert_out;
  const int32_t* pairs;
  const float *row_scales, *scales;

  float* at(int64_t row, int64_t block) const { return expert_out.row<float>(pairs[row]) + block * kBlockN; }
  void write(const float* const (&parts)[1], Range rows, int64_t block) const {
    for_sums(rows, [&](int64_t row, int64_t i) {
      const auto values = scaled_tiles(parts[0] + i, row_scales[row], scales + block * kBlockN);
      for (int v = 0; v < 2; ++v) store(at(row, block) + v * kLanes, values[v]);
    });
  }
};

// One projection of an expert, in a thread's scratch memory.
class Int8Projection {
 public:
  static size_t bytes(int64_t k_tiles) {
    const Blocking tall = Blocking::of(int64_t{1} << 30, k_tiles), flat = Blocking::of(1, k_tiles);
    const int64_t stripe = std::max(tall.stripe, flat.stripe);
    const int64_t sums = std::max(sums_of(k_tiles, tall), sums_of(k_tiles, flat));
    return static_cast<size_t>(stripe * kTileRows * 4 + sums * 4 + stripe * k_tiles * kTileBytes);
  }

  Int8Projection(char* memory, int64_t k, int64_t row_count)
      : k_(k),
        m_(row_count),
        k_tiles_(blocks(k, kInt8TileK)),
        blocking_(Blocking::of(blocks(row_count, kTileRows), k_tiles_)),
        row_scales_(reinterpret_cast<float*>(memory)),
        sums_(row_scales_ + blocking_.stripe * kTileRows),
        codes_(reinterpret_cast<char*>(sums_ + sums_of(k_tiles_, blocking_))) {}

  // rows(i) points to row i of the expert. finish(first row, row_scales) returns the Finish of the stripe that begins
  // there.
  template <int kParts, class Rows, class Finish>
  void run(const char* weight, Range results, const Rows& rows, const Finish& finish) const {
    const int64_t end = results.end * kParts;
    for (int64_t first = 0; first < m_; first += blocking_.stripe * kTileRows) {
      const int64_t m = std::min(blocking_.stripe * kTileRows, m_ - first);
      const bool few = m_ <= kTileRows;
      const PackedRows packed{codes_, blocks(m, kTileRows), k_tiles_, few ? k_tiles_ : blocking_.panel};
      FirstBlocks ahead(weight, {results.begin * kParts, end}, k_tiles_ * kInt8BlockStep);
      for (int64_t i = 0; i < m; ++i) {
        row_scales_[i] = quantise_into(rows(first + i), k_, packed, i / kTileRows, i % kTileRows, ahead);
      }
      if (few) return stream_results<kParts>(packed, m, weight, results, finish(0, row_scales_));
      const Tiles tiles(panel_tiles(kTileRows));
      multiply_stripe<Int8Dot, kParts>(packed, {0, packed.row_tiles}, weight, results, blocking_, m, sums_,
                                       finish(first, row_scales_));
    }
  }

 private:
  static int64_t sums_of(int64_t k_tiles, const Blocking& blocking) {
    const PackedRows rows{nullptr, 0, k_tiles, blocking.panel};
    return std::max(band_sums<1>(rows, blocking), band_sums<2>(rows, blocking));
  }

  const int64_t k_, m_, k_tiles_;
  const Blocking blocking_;
  float *const row_scales_, *const sums_;
  char* const codes_;
};

// middle: fp32 [m * top][width up to 32s]
static void moe_int8(const Args& args, Team& team) {
  const ExpertsArgs a(args);
  const int64_t in_tiles = blocks(a.hidden, kInt8TileK), middle_tiles = blocks(a.width, kInt8TileK);
  const size_t batches_bytes = ExpertBatches::bytes(a.ids, a.experts);
  const size_t work = std::max(Int8Projection::bytes(in_tiles), Int8Projection::bytes(middle_tiles));
  char* const memory = static_cast<char*>(team.scratch(batches_bytes + work));
  const ExpertBatches batches(a.ids, a.experts, memory);
  const ExpertQueues queues(a, team);

  batches.for_work(a.width_blocks, kMemoryBoundRows, queues.gate_up, team, [&](const ExpertBatch& batch, Range own) {
    const int64_t first_block = batch.expert * a.width_blocks * 2;
    const float* const scales = a.gate_up[1].as<const float>() + first_block * kBlockN;
    const auto row = [&](int64_t i) { return a.x.row<const bf16>(batches.order[batch.first + i] / batches.top); };
    Int8Projection(memory + batches_bytes, a.hidden, batch.rows)
        .run<2>(a.gate_up[0].as<const char>() + first_block * in_tiles * kInt8BlockStep, own, row,
                [&](int64_t first, const float* row_scales) {
                  return Int8GatedFinish{a.middle, batch.first + first, row_scales, scales};
                });
  });
  team.barrier();
  batches.for_work(a.hidden_blocks, kMemoryBoundRows, queues.down, team, [&](const ExpertBatch& batch, Range own) {
    const int64_t first_block = batch.expert * a.hidden_blocks;
    const float* const scales = a.down[1].as<const float>() + first_block * kBlockN;
    const auto row = [&](int64_t i) { return a.middle.row<const float>(batch.first + i); };
    Int8Projection(memory + batches_bytes, a.width, batch.rows)
        .run<1>(a.down[0].as<const char>() + first_block * middle_tiles * kInt8BlockStep, own, row,
                [&](int64_t first, const float* row_scales) {
                  return Int8ChoiceFinish{a.expert_out, batches.order + batch.first + first, row_scales, scales};
                });
  });
  team.barrier();
  sum_choices<bf16>(a, team);
}
TR_KERNEL(moe_int8)

}  // namespace tilerank::TR_RUNG
#endif
