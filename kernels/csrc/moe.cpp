// Fused experts with vector instructions: out = sum over a token's experts of weight * down(silu(gate(x)) * up(x)).
#ifndef TR_RUNG
#include "cpu.h"
#include "experts.h"
#define TR_SOURCE "moe.cpp"
#include "foreach_isa.h"
#else
#include "experts_rows.h"
#include "panels.h"
#include "products.h"

namespace tilerank::TR_RUNG {

// middle[m * top, width up to 32s]
template <class T>
static void moe(const Args& args, Team& team) {
  constexpr int64_t kHiddenRows = kLanes;  // whose products take as long as to read a weight
  const ExpertsArgs a(args);
  const size_t grouping_bytes = Grouping::bytes(a.ids, a.experts);
  const int64_t chunk = std::min(a.ids.size[0] * a.ids.size[1], kStripe * kPanelRows);
  const size_t products = products_bytes<T>(chunk);
  char* const memory = static_cast<char*>(
      team.scratch(grouping_bytes + products + RowPanels<T>::bytes(chunk, std::max(a.hidden, a.width))));
  const Grouping grouping(a.ids, a.experts, memory);
  const ExpertsDeal deal(a, team);
  char* const working = memory + grouping_bytes;
  // A group's rows with its expert's weight; rows and what emit gets count all groups' pairs.
  const auto multiply = [&](const Group& group, Range own, const T* weight, int64_t k, int64_t parts, const auto& row,
                            const auto& emit) {
    for (int64_t first = group.first; first < group.first + group.rows; first += chunk) {
      const RowPanels<T> panels(working + products, std::min(chunk, group.first + group.rows - first), k);
      panels.pack_all([&](int64_t i) { return row(first + i); });
      multiply_results(panels, BlockRun<T>{weight, k}, parts, own, working,
                       [&](int64_t i, int64_t result, const float* sums, const float* last) {
                         emit(first + i, result * kBlockN, sums, last);
                       });
    }
  };

  const int64_t in = a.width_blocks * 2 * block_elements<T>(a.hidden),
                back = a.hidden_blocks * block_elements<T>(a.width);
  grouping.deal(a.width_blocks, kHiddenRows, deal.gate_up, team, [&](const Group& group, Range own) {
    multiply(
        group, own, a.gate_up->as<const T>() + group.expert * in, a.hidden, 2,
        [&](int64_t pair) { return a.x.row<const T>(grouping.order[pair] / grouping.top); },
        [&](int64_t pair, int64_t column, const float* gate, const float* up) {
          T* const out = a.middle.row<T>(pair) + column;
          for (int v = 0; v < kVecs; ++v) {
            store_gated(out + v * kLanes, load(gate + v * kLanes), load(up + v * kLanes));
          }
        });
  });
  team.barrier();
  grouping.deal(a.hidden_blocks, kHiddenRows, deal.down, team, [&](const Group& group, Range own) {
    multiply(
        group, own, a.down->as<const T>() + group.expert * back, a.width, 1,
        [&](int64_t pair) { return a.middle.row<const T>(pair); },
        [&](int64_t pair, int64_t column, const float* sums, const float*) {
          float* const out = a.partial.row<float>(grouping.order[pair]) + column;
          for (int v = 0; v < kVecs; ++v) store(out + v * kLanes, load(sums + v * kLanes));
        });
  });
  team.barrier();
  sum_choices<T>(a, team);
}

static void moe_f32(const Args& args, Team& team) { moe<float>(args, team); }
TR_KERNEL(moe_f32)

static void moe_bf16(const Args& args, Team& team) { moe<bf16>(args, team); }
TR_KERNEL(moe_bf16)

}  // namespace tilerank::TR_RUNG
#endif
