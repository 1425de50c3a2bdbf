// The rows of each expert, and how the work is distributed over threads. Every thread computes this for itself: it is
// cheap and saves a barrier.
#pragma once
#include <algorithm>
#include <string>

#include "core/entry.h"
#include "core/work_queue.h"
#include "linear/pack.h"

namespace tilerank {

// The rows routed to one expert: (token, choice) pairs order[first] to order[first + rows - 1], in ascending order.
struct ExpertBatch {
  int64_t expert, first, rows;
  int64_t row_tile;  // row tiles of all batches before this one
};

// The (token, choice) pairs sorted by expert. Pair p is choice p % top of token p / top.
class ExpertBatches {
 public:
  static size_t bytes(const Tensor& ids, int64_t experts) {
    const int64_t pairs = ids.size[0] * ids.size[1];
    return blocks((experts + 1 + pairs) * sizeof(int32_t) + std::min(pairs, experts) * sizeof(ExpertBatch), 64) * 64;
  }

  // memory: bytes(ids, experts) bytes, 64-byte aligned
  ExpertBatches(const Tensor& ids, int64_t experts, void* memory)
      : list(static_cast<ExpertBatch*>(memory)), top(ids.size[1]), pairs_(ids.size[0] * top) {
    order = reinterpret_cast<int32_t*>(list + std::min(pairs_, experts));
    int32_t* const start = order + pairs_;
    std::fill_n(start, experts + 1, 0);
    for (int64_t p = 0; p < pairs_; ++p) ++start[expert_of(ids, p, experts) + 1];
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t rows = start[e + 1];
      start[e + 1] += start[e];
      if (!rows) continue;
      list[count++] = {e, start[e], rows, row_tiles};
      row_tiles += blocks(rows, 16);
    }
    for (int64_t p = 0; p < pairs_; ++p) order[start[expert_of(ids, p, experts)]++] = static_cast<int32_t>(p);
  }

  // Calls f(batch, range) for this thread's ranges of the `blocks` blocks of every batch. With few rows per batch,
  // which is bound by memory, each thread gets one contiguous range; with many, threads take pieces from the queue. A
  // block costs as many units as it has rows, but at least memory_bound_rows: products of fewer rows take less time
  // than reading the weight.
  template <class F>
  void for_work(int64_t blocks, int64_t memory_bound_rows, const WorkQueue& queue, const Team& team, F&& f) const {
    const auto cost = [&](const ExpertBatch& batch) { return std::max(memory_bound_rows, batch.rows); };
    int64_t total = 0;
    for (int64_t g = 0; g < count; ++g) total += cost(list[g]) * blocks;
    const auto run = [&](Range own) {
      int64_t begin = 0;
      for (int64_t g = 0; g < count; ++g) {
        const int64_t unit = cost(list[g]);
        // Rounded equally at both ends, so that consecutive ranges neither overlap nor leave a gap.
        const auto block_at = [&](int64_t at) {
          return std::clamp<int64_t>((at - begin + unit - 1) / unit, 0, blocks);
        };
        const Range part{block_at(std::max(own.begin, begin)), block_at(std::max(own.end, begin))};
        if (part.begin < part.end) f(list[g], part);
        begin += unit * blocks;
      }
    };
    if (pairs_ < kManyRows * count) return run(team.share(total));
    const int64_t pieces = kPieces * team.count;
    for (Range taken = queue.next(pieces, pieces, team); taken.begin < taken.end;
         taken = queue.next(pieces, pieces, team)) {
      run({taken.begin * total / pieces, taken.end * total / pieces});
    }
  }

  ExpertBatch* list;
  int32_t* order;
  int64_t count = 0, row_tiles = 0;
  const int64_t top;

 private:
  static constexpr int64_t kManyRows = 16;  // average rows of a batch from which on the queue is used
  static constexpr int64_t kPieces =
      64;  // pieces per thread, which bounds how much later one thread finishes than another

  static int64_t expert_of(const Tensor& ids, int64_t pair, int64_t experts) {
    const int64_t top = ids.size[1], expert = ids.row<const int32_t>(pair / top)[pair % top];
    if (expert < 0 || expert >= experts) {
      throw Error("moe: ids: expected values in [0, " + std::to_string(experts) + "), found " + std::to_string(expert));
    }
    return expert;
  }

  const int64_t pairs_;
};

// The arguments of the MoE kernels of all formats and rungs. gate_up, down: the weights of all experts.
template <class Weight>
struct ExpertsArgs {
  const Tensor& x;  // [m, hidden]
  const Weight &gate_up, &down;
  const Tensor &ids, &weights;  // [m, top]
  const int64_t experts, width;
  const Tensor& gate_up_bias;  // [experts][width_blocks * 2 * 32] fp32, 32 of gate and of up in turn, or none
  const Tensor& down_bias;     // [experts][hidden_blocks * 32] fp32, or none
  const int64_t activation;
  const Tensor& out;
  const Tensor& middle;      // [row tiles of all batches * 16][width up to 32s], fp32 or narrower
  const Tensor& expert_out;  // [m * top][hidden up to 32s]: the output of every choice
  const Tensor& queues;      // memory of two WorkQueues

  const int64_t hidden = x.size[1];
  const int64_t width_blocks = blocks(width, kBlockN), hidden_blocks = blocks(hidden, kBlockN);
};

// The work queues of both projections.
struct ExpertQueues {
  ExpertQueues(const Tensor& memory, Team& team)
      : gate_up(memory.as<char>()), down(memory.as<char>() + WorkQueue::kBytes) {
    if (team.index == 0) gate_up.begin(), down.begin();
    team.barrier();
  }

  const WorkQueue gate_up, down;
};

}  // namespace tilerank
