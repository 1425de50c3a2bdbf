// Fused experts with int8 weights in vectors. Rows are quantised twice: x, and silu(gate) * up, which is kept in fp32.
#ifndef TR_RUNG
#include <utility>

#include "cpu.h"
#include "experts.h"
#include "int8.h"
#define TR_SOURCE "moe_int8.cpp"
#include "foreach_isa.h"
#else
#include "experts_rows.h"
#include "int8_rows.h"
#include "gemm_int8.h"

namespace tilerank::TR_RUNG {

// A block is read in the time that so many rows are multiplied with it.
constexpr int64_t kHiddenRows8 = kLanes == 16 ? 24 : 4;

// A thread's quantised rows, and what it works with.
struct ExpertRows8 {
  Stripe8 stripe;
  Ints* sums;  // of two blocks
  float steps[Stripe8::kMostRows];

  static constexpr int64_t kPart = Stripe8::kMostRows * kVecs8;

  static size_t bytes(int64_t k) {
    return 2 * kPart * sizeof(Ints) + static_cast<size_t>(Stripe8::kMostRows * Stripe8::row_bytes(k));
  }

  // `memory`: bytes(k) for rows of at most k inputs
  explicit ExpertRows8(char* memory) : sums(reinterpret_cast<Ints*>(memory)) {
    stripe.codes = memory + 2 * kPart * sizeof(Ints);
  }

  // rows(i) is where the k inputs of row i < count are.
  template <class Rows>
  void fill(const Rows& rows, int64_t count, int64_t k) {
    stripe.rows = count, stripe.k = k;
    stripe.put({0, count}, rows, steps);
  }

  // emit(i, Vec[kVecs8] ...) gets the results of each row with kParts blocks, from `block` on, of a weight (its
  // operands).
  template <int kParts, class Emit>
  void multiply(const Tensor* weight, int64_t block, const Emit& emit) const {
    const auto block_of = [&](int64_t part) { return Block8(weight, block + part, stripe.k); };
    for (int64_t part = 0; part < kParts; ++part) stripe.multiply(block_of(part).codes, sums + part * kPart);
    for (int64_t i = 0; i < stripe.rows; ++i) {
      Vec parts[2][kVecs8];
      for (int64_t part = 0; part < kParts; ++part) {
        stripe.values(sums + part * kPart, i, steps[i], block_of(part), parts[part]);
      }
      emit(i, parts[0], parts[1]);
    }
  }
};

// middle[m * top, width up to 32s]
static void moe_int8(const Args& args, Team& team) {
  const ExpertsArgs a(args);
  const size_t grouping_bytes = Grouping::bytes(a.ids, a.experts);
  const size_t rows_bytes = ExpertRows8::bytes(std::max(a.hidden, a.width));
  char* const memory = static_cast<char*>(team.scratch(grouping_bytes + rows_bytes));
  const Grouping grouping(a.ids, a.experts, memory);
  const ExpertsDeal deal(a, team);
  ExpertRows8 rows(memory + grouping_bytes);

  // f(first) for every stripe of rows in the group, `first` among all, once they are in `rows`
  const auto for_stripes = [&](const Group& group, int64_t k, const auto& input, const auto& f) {
    const int64_t end = group.first + group.rows;
    for (int64_t first = group.first; first < end; first += Stripe8::kMostRows) {
      rows.fill([&](int64_t i) { return input(first + i); }, std::min(Stripe8::kMostRows, end - first), k);
      f(first);
    }
  };
  grouping.deal(a.width_blocks, kHiddenRows8, deal.gate_up, team, [&](const Group& group, Range own) {
    const auto input = [&](int64_t i) { return a.x.row<const bf16>(grouping.order[i] / grouping.top); };
    for_stripes(group, a.hidden, input, [&](int64_t first) {
      for (int64_t block = own.begin; block < own.end; ++block) {
        const int64_t gate = (group.expert * a.width_blocks + block) * 2;
        rows.multiply<2>(a.gate_up, gate, [&](int64_t i, const Vec* gates, const Vec* ups) {
          float* const out = a.middle.row<float>(first + i) + block * kBlockN;
          for (int v = 0; v < kVecs8; ++v) store(out + v * kLanes, silu(gates[v]) * ups[v]);
        });
      }
    });
  });
  team.barrier();
  grouping.deal(a.hidden_blocks, kHiddenRows8, deal.down, team, [&](const Group& group, Range own) {
    const auto input = [&](int64_t i) { return a.middle.row<const float>(i); };
    for_stripes(group, a.width, input, [&](int64_t first) {
      for (int64_t block = own.begin; block < own.end; ++block) {
        rows.multiply<1>(a.down, group.expert * a.hidden_blocks + block, [&](int64_t i, const Vec* x, const Vec*) {
          float* const out = a.partial.row<float>(grouping.order[first + i]) + block * kBlockN;
          for (int v = 0; v < kVecs8; ++v) store(out + v * kLanes, x[v]);
        });
      }
    });
  });
  team.barrier();
  sum_choices<bf16>(a, team);
}
TR_KERNEL(moe_int8)

}  // namespace tilerank::TR_RUNG
#endif
