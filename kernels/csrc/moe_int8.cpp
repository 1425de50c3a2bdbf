// Fused experts with int8 weights in vectors. Rows are quantised twice: x, and silu(gate) * up, which is kept in fp32.
#ifndef TR_RUNG
#include "experts.h"
#include "int8.h"
#define TR_SOURCE "moe_int8.cpp"
#include "foreach_isa.h"
#else
#include "experts_rows.h"
#include "int8_rows.h"
#include "gemm_int8.h"

namespace tilerank::TR_RUNG {

constexpr int64_t kChunk = 10 * kRows8;  // rows that are quantised together

// A thread's quantised rows.
struct QuantisedRows {
  int8_t* codes;
  float steps[kChunk];
  int64_t row_bytes;

  // rows(i) is where the k inputs of row i < count are.
  template <class Rows>
  void fill(const Rows& rows, int64_t count, int64_t k) {
    row_bytes = row_bytes8(k);
    for (int64_t i = 0; i < count; ++i) {
      steps[i] = quantise_row(rows(i), k, [&](int64_t t) { return codes + i * row_bytes + t * kBlockK8; });
    }
  }

  // emit(i, Vec[kVecs8]) gets the results of each row with block `block` of a weight (codes and scales).
  template <class Emit>
  void multiply(int64_t count, const Tensor* weight, int64_t block, const Emit& emit) const {
    const int8_t* const w = weight[0].as<const int8_t>() + block * row_bytes * kBlockN;
    const float* const scales = weight[1].as<const float>() + block * kBlockN;
    multiply_block8(codes, row_bytes, count, w, [&](int64_t i, const Ints* sums) {
      Vec values[kVecs8];
      for (int v = 0; v < kVecs8; ++v) values[v] = scaled(sums[v], steps[i], scales + v * kLanes);
      emit(i, values);
    });
  }
};

// middle[m * top, width up to 32s]
static void moe_int8(const Args& args, Team& team) {
  const ExpertsArgs a(args);
  const size_t grouping_bytes = Grouping::bytes(a.ids, a.experts);
  const size_t row_bytes = static_cast<size_t>(row_bytes8(std::max(a.hidden, a.width)));
  char* const memory = static_cast<char*>(team.scratch(grouping_bytes + kChunk * row_bytes));
  const Grouping grouping(a.ids, a.experts, memory);
  QuantisedRows rows;
  rows.codes = reinterpret_cast<int8_t*>(memory + grouping_bytes);

  grouping.deal(a.width_blocks, kRows8, team, [&](const Group& group, Range own) {
    for (int64_t first = group.first; first < group.first + group.rows; first += kChunk) {
      const int64_t count = std::min(kChunk, group.first + group.rows - first);
      rows.fill([&](int64_t i) { return a.x.row<const bf16>(grouping.order[first + i] / grouping.top); }, count,
                a.hidden);
      for (int64_t block = own.begin; block < own.end; ++block) {
        Vec gates[kChunk][kVecs8];
        const int64_t gate = (group.expert * a.width_blocks + block) * 2;
        rows.multiply(count, a.gate_up, gate, [&](int64_t i, const Vec* x) { std::copy_n(x, kVecs8, gates[i]); });
        rows.multiply(count, a.gate_up, gate + 1, [&](int64_t i, const Vec* x) {
          float* const out = a.middle.row<float>(first + i) + block * kBlockN;
          for (int v = 0; v < kVecs8; ++v) store(out + v * kLanes, silu(gates[i][v]) * x[v]);
        });
      }
    }
  });
  team.barrier();
  grouping.deal(a.hidden_blocks, kRows8, team, [&](const Group& group, Range own) {
    for (int64_t first = group.first; first < group.first + group.rows; first += kChunk) {
      const int64_t count = std::min(kChunk, group.first + group.rows - first);
      rows.fill([&](int64_t i) { return a.middle.row<const float>(first + i); }, count, a.width);
      for (int64_t block = own.begin; block < own.end; ++block) {
        rows.multiply(count, a.down, group.expert * a.hidden_blocks + block, [&](int64_t i, const Vec* x) {
          float* const out = a.partial.row<float>(grouping.order[first + i]) + block * kBlockN;
          for (int v = 0; v < kVecs8; ++v) store(out + v * kLanes, x[v]);
        });
      }
    }
  });
  team.barrier();
  sum_choices<bf16>(a, team);
}
TR_KERNEL(moe_int8)

}  // namespace tilerank::TR_RUNG
#endif
