// Fused MoE with block-scaled weights in vectors. silu(gate) * up is rounded once, to bf16.
#ifndef TR_RUNG
#include <array>
#include <type_traits>

#include "core/cpu.h"
#include "moe/experts.h"
#include "block_scaled/block_scaled.h"
#define TR_SOURCE "moe/moe_block_scaled.cpp"
#include "simd/foreach_isa.h"
#else
#include "moe/experts_rows-inl.h"
#include "block_scaled/block_scaled_rows-inl.h"

namespace tilerank::TR_RUNG {

// Multiplies rows of one expert, stripe by stripe, in a thread's scratch memory.
class ExpertRows {
 public:
  static constexpr int64_t kRows = kStripeRows;

  template <class Format>
  static size_t bytes(const Format& weight, int64_t m, int64_t k) {
    return sizeof(BlockScaledScratch) + BlockScaledRows::bytes(std::min(m, kRows), k, weight.k_blocks);
  }

  // multiply_results for the results `own` of an expert's weight and rows rows.begin to rows.end.
  template <int kParts, class Format, class Row, class Emit>
  static void multiply(const Row& row, Range rows, const Format& weight, Range own, int64_t k, char* memory,
                       const Emit& emit) {
    for (int64_t first = rows.begin; first < rows.end; first += kRows) {
      const int64_t m = std::min(kRows, rows.end - first);
      const BlockScaledRows packed(memory + sizeof(BlockScaledScratch), m, k, weight);
      packed.pack([&](int64_t i) { return row(first + i); }, weight, Team(nullptr, 0, 1));
      multiply_results<kParts>(packed, {0, packed.panels.panels}, weight, own, k, memory,
                               [&](int64_t i, int64_t result, const auto& totals) { emit(first + i, result, totals); });
    }
  }
};

template <class Format>
static void moe(const Args& args, Team& team) {
  const ExpertsArgs a(args);
  const Format gate_up(a.gate_up), down(a.down);
  const size_t batches_bytes = ExpertBatches::bytes(a.ids, a.experts);
  const int64_t pairs = a.ids.size[0] * a.ids.size[1];
  const size_t working = std::max(ExpertRows::bytes(gate_up, pairs, a.hidden), ExpertRows::bytes(down, pairs, a.width));
  char* const memory = static_cast<char*>(team.scratch(batches_bytes + working));
  char* const rest = memory + batches_bytes;
  const ExpertBatches batches(a.ids, a.experts, memory);
  const ExpertQueues queues(a, team);
  const auto middle = [&](int64_t i) { return a.middle.as<bf16>() + i * a.width_blocks * kBlockN; };
  // The results of an expert follow those of the experts before it in the weight.
  const auto of_expert = [](const ExpertBatch& batch, int64_t results, Range own) {
    return Range{batch.expert * results + own.begin, batch.expert * results + own.end};
  };

  batches.for_work(a.width_blocks, kPanelRows, queues.gate_up, team, [&](const ExpertBatch& batch, Range own) {
    const auto row = [&](int64_t i) { return a.x.row<const bf16>(batches.order[i] / batches.top); };
    ExpertRows::multiply<2>(row, {batch.first, batch.first + batch.rows}, gate_up,
                            of_expert(batch, a.width_blocks, own), a.hidden, rest,
                            [&](int64_t i, int64_t result, const float* const(&totals)[2]) {
                              bf16* const out = middle(i) + result % a.width_blocks * kBlockN;
                              const auto gate = load_row(totals[0]), up = load_row(totals[1]);
                              for (int v = 0; v < kVecs; ++v) store(out + v * kLanes, silu(gate[v]) * up[v]);
                            });
  });
  team.barrier();
  batches.for_work(a.hidden_blocks, kPanelRows, queues.down, team, [&](const ExpertBatch& batch, Range own) {
    const auto row = [&](int64_t i) -> const bf16* { return middle(i); };
    ExpertRows::multiply<1>(row, {batch.first, batch.first + batch.rows}, down, of_expert(batch, a.hidden_blocks, own),
                            a.width, rest, [&](int64_t i, int64_t result, const float* const(&totals)[1]) {
                              float* const out =
                                  a.expert_out.row<float>(batches.order[i]) + result % a.hidden_blocks * kBlockN;
                              const auto sums = load_row(totals[0]);
                              for (int v = 0; v < kVecs; ++v) store(out + v * kLanes, sums[v]);
                            });
  });
  team.barrier();
  sum_choices<bf16>(a, team);
}

TR_BLOCK_SCALED_KERNELS(moe)

}  // namespace tilerank::TR_RUNG
#endif
