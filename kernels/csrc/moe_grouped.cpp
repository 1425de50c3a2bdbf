// Fused experts with int4 and fp8 weights in vectors. silu(gate) * up is rounded once, to bf16.
#ifndef TR_RUNG
#include <array>
#include <type_traits>

#include "cpu.h"
#include "experts.h"
#include "grouped.h"
#define TR_SOURCE "moe_grouped.cpp"
#include "foreach_isa.h"
#else
#include "experts_rows.h"
#include "grouped_rows.h"

namespace tilerank::TR_RUNG {

// What a thread works with on rows of one expert at a time.
class ExpertRows {
 public:
  static constexpr int64_t kRows = kStripeRows;

  template <class Format>
  static size_t bytes(const Format& weight, int64_t m, int64_t k) {
    return sizeof(GroupedWork) + GroupedRows::bytes(std::min(m, kRows), k, weight.groups);
  }

  // As multiply_results, for rows [first, end) and results `own` of an expert's weight.
  template <int kParts, class Format, class Row, class Emit>
  static void multiply(const Row& row, Range rows, const Format& weight, Range own, int64_t k, char* memory,
                       const Emit& emit) {
    for (int64_t first = rows.begin; first < rows.end; first += kRows) {
      const int64_t m = std::min(kRows, rows.end - first);
      const GroupedRows packed(memory + sizeof(GroupedWork), m, k, weight);
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
  const size_t grouping_bytes = Grouping::bytes(a.ids, a.experts);
  const int64_t pairs = a.ids.size[0] * a.ids.size[1];
  const size_t working = std::max(ExpertRows::bytes(gate_up, pairs, a.hidden), ExpertRows::bytes(down, pairs, a.width));
  char* const memory = static_cast<char*>(team.scratch(grouping_bytes + working));
  char* const rest = memory + grouping_bytes;
  const Grouping grouping(a.ids, a.experts, memory);
  const ExpertsDeal deal(a, team);
  const auto middle = [&](int64_t i) { return a.middle.as<bf16>() + i * a.width_blocks * kBlockN; };
  // The results of an expert's weight lie behind those of the experts before.
  const auto of_expert = [](const Group& group, int64_t results, Range own) {
    return Range{group.expert * results + own.begin, group.expert * results + own.end};
  };

  grouping.deal(a.width_blocks, kPanelRows, deal.gate_up, team, [&](const Group& group, Range own) {
    const auto row = [&](int64_t i) { return a.x.row<const bf16>(grouping.order[i] / grouping.top); };
    ExpertRows::multiply<2>(row, {group.first, group.first + group.rows}, gate_up,
                            of_expert(group, a.width_blocks, own), a.hidden, rest,
                            [&](int64_t i, int64_t result, const float* const(&totals)[2]) {
                              bf16* const out = middle(i) + result % a.width_blocks * kBlockN;
                              const auto gate = load_row(totals[0]), up = load_row(totals[1]);
                              for (int v = 0; v < kVecs; ++v) store(out + v * kLanes, silu(gate[v]) * up[v]);
                            });
  });
  team.barrier();
  grouping.deal(a.hidden_blocks, kPanelRows, deal.down, team, [&](const Group& group, Range own) {
    const auto row = [&](int64_t i) -> const bf16* { return middle(i); };
    ExpertRows::multiply<1>(row, {group.first, group.first + group.rows}, down, of_expert(group, a.hidden_blocks, own),
                            a.width, rest, [&](int64_t i, int64_t result, const float* const(&totals)[1]) {
                              float* const out =
                                  a.partial.row<float>(grouping.order[i]) + result % a.hidden_blocks * kBlockN;
                              const auto sums = load_row(totals[0]);
                              for (int v = 0; v < kVecs; ++v) store(out + v * kLanes, sums[v]);
                            });
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
