// Which rows go to which expert, and how the work is dealt out. Every thread works this out for itself: it is little,
// and spares a barrier.
#pragma once
#include <algorithm>
#include <string>

#include "deal.h"
#include "kernel.h"
#include "pack.h"

namespace tilerank {

// The rows of one expert: pairs order[first] ... of (token, choice), in ascending order.
struct Group {
  int64_t expert, first, rows;
  int64_t row_tile;  // tiles of 16 rows of the groups before
};

// Pair p is choice p % top of token p / top.
class Grouping {
 public:
  static size_t bytes(const Tensor& ids, int64_t experts) {
    const int64_t pairs = ids.size[0] * ids.size[1];
    return blocks((experts + 1 + pairs) * sizeof(int32_t) + std::min(pairs, experts) * sizeof(Group), 64) * 64;
  }

  // `memory`: bytes(ids, experts), 64-byte aligned
  Grouping(const Tensor& ids, int64_t experts, void* memory)
      : groups(static_cast<Group*>(memory)), top(ids.size[1]), pairs_(ids.size[0] * top) {
    order = reinterpret_cast<int32_t*>(groups + std::min(pairs_, experts));
    int32_t* const start = order + pairs_;
    std::fill_n(start, experts + 1, 0);
    for (int64_t p = 0; p < pairs_; ++p) ++start[expert_of(ids, p, experts) + 1];
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t rows = start[e + 1];
      start[e + 1] += start[e];
      if (!rows) continue;
      groups[count++] = {e, start[e], rows, row_tiles};
      row_tiles += blocks(rows, 16);
    }
    for (int64_t p = 0; p < pairs_; ++p) order[start[expert_of(ids, p, experts)]++] = static_cast<int32_t>(p);
  }

  // f(group, its blocks) for this thread's parts of every group's `blocks`: one of few rows, which are bound by memory
  // and read best in order, and of many as threads come for more. A block costs its rows, or the reading of the weight,
  // which takes as long as the products of `hidden_rows` rows do.
  template <class F>
  void deal(int64_t blocks, int64_t hidden_rows, const Deal& deal, const Team& team, F&& f) const {
    const auto cost = [&](const Group& group) { return std::max(hidden_rows, group.rows); };
    int64_t total = 0;
    for (int64_t g = 0; g < count; ++g) total += cost(groups[g]) * blocks;
    const auto run = [&](Range own) {
      int64_t begin = 0;
      for (int64_t g = 0; g < count; ++g) {
        const int64_t unit = cost(groups[g]);
        // The same rounding at both ends, so that one part's last block is before the next part's first.
        const auto block_at = [&](int64_t at) {
          return std::clamp<int64_t>((at - begin + unit - 1) / unit, 0, blocks);
        };
        const Range part{block_at(std::max(own.begin, begin)), block_at(std::max(own.end, begin))};
        if (part.begin < part.end) f(groups[g], part);
        begin += unit * blocks;
      }
    };
    if (pairs_ < kManyRows * count) return run(team.share(total));
    const int64_t pieces = kPieces * team.count;
    for (Range dealt; (dealt = deal.next(pieces, pieces, team)).begin < dealt.end;) {
      run({dealt.begin * total / pieces, dealt.end * total / pieces});
    }
  }

  Group* groups;
  int32_t* order;
  int64_t count = 0, row_tiles = 0;
  const int64_t top;

 private:
  static constexpr int64_t kManyRows = 16;  // of a group, on average
  static constexpr int64_t kPieces = 64;    // of the work, for every thread: what one may end later than another

  static int64_t expert_of(const Tensor& ids, int64_t pair, int64_t experts) {
    const int64_t top = ids.size[1], expert = ids.row<const int32_t>(pair / top)[pair % top];
    if (expert < 0 || expert >= experts) {
      throw Error("moe: ids: expected values in [0, " + std::to_string(experts) + "), found " + std::to_string(expert));
    }
    return expert;
  }

  const int64_t pairs_;
};

// What the kernels of all formats and rungs are called with: tensors x[m, hidden], ids[m, top] i32, weights[m, top]
// f32, middle and partial (working memory), out[m, hidden], dealt, then the operands of the gate and up projections,
// and of the down projections, of all experts: as many tensors as a weight of the format has. ints experts, width.
struct ExpertsArgs {
  explicit ExpertsArgs(const Args& args)
      : x(args.tensor(0)),
        ids(args.tensor(1)),
        weights(args.tensor(2)),
        middle(args.tensor(3)),
        partial(args.tensor(4)),
        out(args.tensor(5)),
        dealt(args.tensor(6).as<char>()),
        gate_up(&args.tensor(kOperands)),
        down(gate_up + (args.num_tensors - kOperands) / 2),
        experts(args.integer(0)),
        width(args.integer(1)),
        hidden(x.size[1]),
        width_blocks(blocks(width, kBlockN)),
        hidden_blocks(blocks(hidden, kBlockN)) {}

  static constexpr int kOperands = 7;

  const Tensor &x, &ids, &weights;
  const Tensor& middle;   // fp32 for every tile of rows of every expert x width up to 32s
  const Tensor& partial;  // [m * top, hidden up to 32s]: every choice's output in fp32
  const Tensor& out;
  char* const dealt;             // for two Deals
  const Tensor *gate_up, *down;  // operands
  const int64_t experts, width, hidden, width_blocks, hidden_blocks;
};

// What the blocks of both projections are dealt from.
struct ExpertsDeal {
  ExpertsDeal(const ExpertsArgs& a, Team& team) : gate_up(a.dealt), down(a.dealt + Deal::kBytes) {
    if (team.index == 0) gate_up.begin(), down.begin();
    team.barrier();
  }

  const Deal gate_up, down;
};

}  // namespace tilerank
