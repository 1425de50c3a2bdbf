// Fused experts with int4 and fp8 weights in vectors. silu(gate) * up is rounded once, to bf16.
#ifndef TR_RUNG
#include <array>

#include "experts.h"
#include "grouped.h"
#define TR_SOURCE "moe_grouped.cpp"
#include "foreach_isa.h"
#else
#include "experts_rows.h"
#include "gemm.h"
#include "grouped_formats.h"
#include "grouped_rows.h"

namespace tilerank::TR_RUNG {

template <class Format>
static void moe(const Args& args, Team& team) {
  const ExpertsArgs a(args);
  const Format gate_up(a.gate_up), down(a.down);
  const size_t grouping_bytes = Grouping::bytes(a.ids, a.experts);
  const size_t working = std::max(grouped_bytes(gate_up), grouped_bytes(down));
  char* const memory =
      static_cast<char*>(team.scratch(grouping_bytes + working + kGroupedRows * kBlockN * sizeof(float)));
  const Grouping grouping(a.ids, a.experts, memory);
  float* const gates = reinterpret_cast<float*>(memory + grouping_bytes + working);
  const auto middle = [&](int64_t i) { return a.middle.as<bf16>() + i * a.width_blocks * kBlockN; };
  // f(first, count) for parts of a group's rows
  const auto for_chunks = [](const Group& group, const auto& f) {
    const int64_t end = group.first + group.rows;
    for (int64_t first = group.first; first < end; first += kGroupedRows) f(first, std::min(kGroupedRows, end - first));
  };

  grouping.deal(a.width_blocks, kRows, team, [&](const Group& group, Range own) {
    for (int64_t block = own.begin; block < own.end; ++block) {
      const int64_t gate = (group.expert * a.width_blocks + block) * 2;
      for_chunks(group, [&](int64_t first, int64_t m) {
        const auto rows = [&](int64_t i) { return a.x.row<const bf16>(grouping.order[first + i] / grouping.top); };
        multiply_grouped(rows, m, gate_up, gate, a.hidden, memory + grouping_bytes, [&](int64_t i, const Vec* sums) {
          for (int v = 0; v < kVecs; ++v) store(gates + i * kBlockN + v * kLanes, sums[v]);
        });
        multiply_grouped(rows, m, gate_up, gate + 1, a.hidden, memory + grouping_bytes,
                         [&](int64_t i, const Vec* sums) {
                           bf16* const out = middle(first + i) + block * kBlockN;
                           for (int v = 0; v < kVecs; ++v) {
                             store(out + v * kLanes, silu(load(gates + i * kBlockN + v * kLanes)) * sums[v]);
                           }
                         });
      });
    }
  });
  team.barrier();
  grouping.deal(a.hidden_blocks, kRows, team, [&](const Group& group, Range own) {
    for (int64_t block = own.begin; block < own.end; ++block) {
      for_chunks(group, [&](int64_t first, int64_t m) {
        const auto rows = [&](int64_t i) -> const bf16* { return middle(first + i); };
        multiply_grouped(rows, m, down, group.expert * a.hidden_blocks + block, a.width, memory + grouping_bytes,
                         [&](int64_t i, const Vec* sums) {
                           float* const out = a.partial.row<float>(grouping.order[first + i]) + block * kBlockN;
                           for (int v = 0; v < kVecs; ++v) store(out + v * kLanes, sums[v]);
                         });
      });
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
