// Fused MoE with int8 weights in vectors. x is quantised, and so is silu(gate) * up, which is kept in fp32 before.
#ifndef TR_RUNG
#include <utility>

#include "core/cpu.h"
#include "moe/experts.h"
#include "linear/int8.h"
#define TR_SOURCE "moe/moe_int8.cpp"
#include "simd/foreach_isa.h"
#else
#include "moe/experts_rows-inl.h"
#include "linear/int8_rows-inl.h"
#include "linear/gemm_int8-inl.h"

namespace tilerank::TR_RUNG {

// The products of this many rows take as long as reading a block.
constexpr int64_t kMemoryBoundRows = kLanes == 16 ? 24 : 4;

// A thread's quantised rows and the sums of their products.
struct Int8ExpertRows {
  Int8Stripe stripe;
  Ints* sums;  // sums with two blocks
  float row_scales[Int8Stripe::kMostRows];

  static constexpr int64_t kPartSums = Int8Stripe::kMostRows * kInt8Vecs;

  static size_t bytes(int64_t k) {
    return 2 * kPartSums * sizeof(Ints) + static_cast<size_t>(Int8Stripe::kMostRows * Int8Stripe::row_bytes(k));
  }

  // memory: bytes(k) bytes, for rows of at most k inputs
  explicit Int8ExpertRows(char* memory) : sums(reinterpret_cast<Ints*>(memory)) {
    stripe.codes = memory + 2 * kPartSums * sizeof(Ints);
  }

  // Quantises `count` rows; rows(i) points to the k inputs of row i.
  template <class Rows>
  void fill(const Rows& rows, int64_t count, int64_t k) {
    stripe.rows = count, stripe.k = k;
    stripe.put({0, count}, rows, row_scales);
  }

  // emit(i, gate, up), Vec[kInt8Vecs] each, receives the products of each row with kParts blocks of a weight, from
  // `block` on.
  template <int kParts, class Emit>
  void multiply(const Tensor* weight, int64_t block, const Emit& emit) const {
    const auto block_of = [&](int64_t part) { return Int8Block(weight, block + part, stripe.k); };
    for (int64_t part = 0; part < kParts; ++part) stripe.multiply(block_of(part).codes, sums + part * kPartSums);
    for (int64_t i = 0; i < stripe.rows; ++i) {
      Vec parts[2][kInt8Vecs];
      for (int64_t part = 0; part < kParts; ++part) {
        stripe.values(sums + part * kPartSums, i, row_scales[i], block_of(part), parts[part]);
      }
      emit(i, parts[0], parts[1]);
    }
  }
};

// middle: fp32 [m * top][width up to 32s]
static void moe_int8(const Args& args, Team& team) {
  const ExpertsArgs a(args);
  const size_t batches_bytes = ExpertBatches::bytes(a.ids, a.experts);
  const size_t rows_bytes = Int8ExpertRows::bytes(std::max(a.hidden, a.width));
  char* const memory = static_cast<char*>(team.scratch(batches_bytes + rows_bytes));
  const ExpertBatches batches(a.ids, a.experts, memory);
  const ExpertQueues queues(a, team);
  Int8ExpertRows rows(memory + batches_bytes);

  // Calls f(first) for every stripe of a batch, after quantising it into `rows`; `first` is its first row among all
  // pairs.
  const auto for_stripes = [&](const ExpertBatch& batch, int64_t k, const auto& input, const auto& f) {
    const int64_t end = batch.first + batch.rows;
    for (int64_t first = batch.first; first < end; first += Int8Stripe::kMostRows) {
      rows.fill([&](int64_t i) { return input(first + i); }, std::min(Int8Stripe::kMostRows, end - first), k);
      f(first);
    }
  };
  batches.for_work(a.width_blocks, kMemoryBoundRows, queues.gate_up, team, [&](const ExpertBatch& batch, Range own) {
    const auto input = [&](int64_t i) { return a.x.row<const bf16>(batches.order[i] / batches.top); };
    for_stripes(batch, a.hidden, input, [&](int64_t first) {
      for (int64_t block = own.begin; block < own.end; ++block) {
        const int64_t gate = (batch.expert * a.width_blocks + block) * 2;
        rows.multiply<2>(a.gate_up, gate, [&](int64_t i, const Vec* gates, const Vec* ups) {
          float* const out = a.middle.row<float>(first + i) + block * kBlockN;
          for (int v = 0; v < kInt8Vecs; ++v) store(out + v * kLanes, silu(gates[v]) * ups[v]);
        });
      }
    });
  });
  team.barrier();
  batches.for_work(a.hidden_blocks, kMemoryBoundRows, queues.down, team, [&](const ExpertBatch& batch, Range own) {
    const auto input = [&](int64_t i) { return a.middle.row<const float>(i); };
    for_stripes(batch, a.width, input, [&](int64_t first) {
      for (int64_t block = own.begin; block < own.end; ++block) {
        rows.multiply<1>(a.down, batch.expert * a.hidden_blocks + block, [&](int64_t i, const Vec* x, const Vec*) {
          float* const out = a.expert_out.row<float>(batches.order[first + i]) + block * kBlockN;
          for (int v = 0; v < kInt8Vecs; ++v) store(out + v * kLanes, x[v]);
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
