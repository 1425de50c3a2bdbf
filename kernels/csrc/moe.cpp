// Fused experts with vector instructions: out = sum over a token's experts of weight * down(silu(gate(x)) * up(x)).
#ifndef TR_RUNG
#include <type_traits>

#include "experts.h"
#define TR_SOURCE "moe.cpp"
#include "foreach_isa.h"
#else
#include "experts_rows.h"
#include "gemm.h"

namespace tilerank::TR_RUNG {

// middle[m * top, width up to 32s]
template <class T>
static void moe(const Args& args, Team& team) {
  const ExpertsArgs a(args);
  const Grouping grouping(a.ids, a.experts, team.scratch(Grouping::bytes(a.ids, a.experts)));
  const int64_t in_block = block_elements<T>(a.hidden), middle_block = block_elements<T>(a.width);

  grouping.deal(a.width_blocks, kRows, team, [&](const Group& group, Range own) {
    constexpr int64_t kChunk = 20 * kRows;
    for (int64_t block = own.begin; block < own.end; ++block) {
      const T* const gate = a.gate_up->as<const T>() + (group.expert * a.width_blocks + block) * 2 * in_block;
      for (int64_t first = group.first; first < group.first + group.rows; first += kChunk) {
        const int64_t m = std::min(kChunk, group.first + group.rows - first);
        const auto rows = [&](int64_t i) { return a.x.row<const T>(grouping.order[first + i] / grouping.top); };
        alignas(64) float gates[kChunk][kBlockN];
        multiply_block(rows, m, gate, a.hidden, [&](int64_t i, const Vec* sums) {
          for (int v = 0; v < kVecs; ++v) store(gates[i] + v * kLanes, sums[v]);
        });
        multiply_block(rows, m, gate + in_block, a.hidden, [&](int64_t i, const Vec* sums) {
          T* const out = a.middle.row<T>(first + i) + block * kBlockN;
          for (int v = 0; v < kVecs; ++v) store_gated(out + v * kLanes, load(gates[i] + v * kLanes), sums[v]);
        });
      }
    }
  });
  team.barrier();
  grouping.deal(a.hidden_blocks, kRows, team, [&](const Group& group, Range own) {
    const auto rows = [&](int64_t i) { return a.middle.row<const T>(group.first + i); };
    for (int64_t block = own.begin; block < own.end; ++block) {
      const T* const weight = a.down->as<const T>() + (group.expert * a.hidden_blocks + block) * middle_block;
      multiply_block(rows, group.rows, weight, a.width, [&](int64_t i, const Vec* sums) {
        float* const out = a.partial.row<float>(grouping.order[group.first + i]) + block * kBlockN;
        for (int v = 0; v < kVecs; ++v) store(out + v * kLanes, sums[v]);
      });
    }
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
