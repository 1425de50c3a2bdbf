// Fused MoE with bf16 and fp32 weights in vectors: out = sum over a token's experts of weight * down(silu(gate(x)) *
// up(x)).
#ifndef TR_RUNG
#include "core/cpu.h"
#include "moe/experts.h"
#define TR_SOURCE "moe/moe.cpp"
#include "simd/foreach_isa.h"
#else
#include "moe/experts_rows-inl.h"
#include "linear/panels-inl.h"
#include "linear/products-inl.h"

namespace tilerank::TR_RUNG {

// middle: [m * top][width up to 32s]
template <class T>
static void moe(const Args& args, Team& team) {
  constexpr int64_t kMemoryBoundRows = kLanes;  // their products take as long as reading the weight
  const ExpertsArgs a(args);
  const size_t batches_bytes = ExpertBatches::bytes(a.ids, a.experts);
  const int64_t chunk = std::min(a.ids.size[0] * a.ids.size[1], kStripe * kPanelRows);
  const size_t products = products_bytes<T>(chunk);
  char* const memory = static_cast<char*>(
      team.scratch(batches_bytes + products + RowPanels<T>::bytes(chunk, std::max(a.hidden, a.width))));
  const ExpertBatches batches(a.ids, a.experts, memory);
  const ExpertQueues queues(a, team);
  char* const working = memory + batches_bytes;
  // Multiplies a batch's rows with its expert's weight; row() and emit() receive positions among all pairs.
  const auto multiply = [&](const ExpertBatch& batch, Range own, const T* weight, int64_t k, int64_t parts,
                            const auto& row, const auto& emit) {
    for (int64_t first = batch.first; first < batch.first + batch.rows; first += chunk) {
      const RowPanels<T> panels(working + products, std::min(chunk, batch.first + batch.rows - first), k);
      panels.pack_all([&](int64_t i) { return row(first + i); });
      multiply_results(panels, PackedBlocks<T>{weight, k}, parts, own, working,
                       [&](int64_t i, int64_t result, const float* sums, const float* last) {
                         emit(first + i, result * kBlockN, sums, last);
                       });
    }
  };

  const int64_t in = a.width_blocks * 2 * block_elements<T>(a.hidden),
                back = a.hidden_blocks * block_elements<T>(a.width);
  batches.for_work(a.width_blocks, kMemoryBoundRows, queues.gate_up, team, [&](const ExpertBatch& batch, Range own) {
    multiply(
        batch, own, a.gate_up->as<const T>() + batch.expert * in, a.hidden, 2,
        [&](int64_t pair) { return a.x.row<const T>(batches.order[pair] / batches.top); },
        [&](int64_t pair, int64_t column, const float* gate, const float* up) {
          T* const out = a.middle.row<T>(pair) + column;
          for (int v = 0; v < kVecs; ++v) {
            store_gated(out + v * kLanes, load(gate + v * kLanes), load(up + v * kLanes));
          }
        });
  });
  team.barrier();
  batches.for_work(a.hidden_blocks, kMemoryBoundRows, queues.down, team, [&](const ExpertBatch& batch, Range own) {
    multiply(
        batch, own, a.down->as<const T>() + batch.expert * back, a.width, 1,
        [&](int64_t pair) { return a.middle.row<const T>(pair); },
        [&](int64_t pair, int64_t column, const float* sums, const float*) {
          float* const out = a.expert_out.row<float>(batches.order[pair]) + column;
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
