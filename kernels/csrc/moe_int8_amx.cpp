// Fused experts with int8 weights in AMX tiles.
#ifndef TR_RUNG
#include <array>

#include "experts.h"
#include "int8.h"
#define TR_ONLY_AMX
#define TR_SOURCE "moe_int8_amx.cpp"
#include "foreach_isa.h"
#else
#include "experts_rows.h"
#include "gemm_amx.h"
#include "int8_rows.h"
#include "stream_amx.h"
#include "gemm_int8_amx.h"

namespace tilerank::TR_RUNG {

// The products of this many rows take as long as reading the weight from memory.
constexpr int64_t kHiddenRows = 192;

// silu(gate) * up in fp32, to be quantised when rows are whole.
struct Int8GatedFinish {
  const Tensor& middle;
  int64_t first;
  const float *steps, *scales;

  void write(const float* const (&parts)[2], Range rows, int64_t block) const {
    for_sums(rows, [&](int64_t row, int64_t i) {
      const auto gate = scaled_tiles(parts[0] + i, steps[row], scales + block * 2 * kBlockN);
      const auto up = scaled_tiles(parts[1] + i, steps[row], scales + (block * 2 + 1) * kBlockN);
      float* const out = middle.row<float>(first + row) + block * kBlockN;
      for (int v = 0; v < 2; ++v) store(out + v * kLanes, silu(gate[v]) * up[v]);
    });
  }
};

// A choice's output, where its token will look for it.
struct Int8ChoiceFinish {
  const Tensor& partial;
  const int32_t* pairs;
  const float *steps, *scales;

  float* at(int64_t row, int64_t block) const { return partial.row<float>(pairs[row]) + block * kBlockN; }
  void write(const float* const (&parts)[1], Range rows, int64_t block) const {
    for_sums(rows, [&](int64_t row, int64_t i) {
      const auto values = scaled_tiles(parts[0] + i, steps[row], scales + block * kBlockN);
      for (int v = 0; v < 2; ++v) store(at(row, block) + v * kLanes, values[v]);
    });
  }
};

// A thread's working memory, and the products of one projection of an expert with it.
class Int8Projection {
 public:
  static size_t bytes(int64_t k_tiles) {
    const Blocking tall = Blocking::of(int64_t{1} << 30, k_tiles), flat = Blocking::of(1, k_tiles);
    const int64_t stripe = std::max(tall.stripe, flat.stripe);
    const int64_t sums = std::max(sums_of(k_tiles, tall), sums_of(k_tiles, flat));
    return static_cast<size_t>(stripe * kTileRows * 4 + sums * 4 + stripe * k_tiles * kTileBytes);
  }

  Int8Projection(char* memory, int64_t k, int64_t row_count)
      : k_(k),
        m_(row_count),
        k_tiles_(blocks(k, kBlockK8)),
        blocking_(Blocking::of(blocks(row_count, kTileRows), k_tiles_)),
        steps_(reinterpret_cast<float*>(memory)),
        sums_(steps_ + blocking_.stripe * kTileRows),
        codes_(reinterpret_cast<char*>(sums_ + sums_of(k_tiles_, blocking_))) {}

  // rows(i): where row i of the expert is; finish(first row, steps): the Finish of a stripe that begins there.
  template <int kParts, class Rows, class Finish>
  void run(const char* weight, Range results, const Rows& rows, const Finish& finish) const {
    const int64_t end = results.end * kParts;
    for (int64_t first = 0; first < m_; first += blocking_.stripe * kTileRows) {
      const int64_t m = std::min(blocking_.stripe * kTileRows, m_ - first);
      const bool few = m_ <= kTileRows;
      const PackedRows packed{codes_, blocks(m, kTileRows), k_tiles_, few ? k_tiles_ : blocking_.panel};
      FirstBlocks ahead(weight, {results.begin * kParts, end}, k_tiles_ * kBlockStep8);
      for (int64_t i = 0; i < m; ++i) {
        steps_[i] = quantise_into(rows(first + i), k_, packed, i / kTileRows, i % kTileRows, ahead);
      }
      if (few) return stream_results<kParts>(packed, m, weight, results, finish(0, steps_));
      const Tiles tiles(panel_tiles(kTileRows));
      multiply_stripe<Int8Dot, kParts>(packed, {0, packed.row_tiles}, weight, results, blocking_, m, sums_,
                                       finish(first, steps_));
    }
  }

 private:
  static int64_t sums_of(int64_t k_tiles, const Blocking& blocking) {
    const PackedRows rows{nullptr, 0, k_tiles, blocking.panel};
    return std::max(band_sums<1>(rows, blocking), band_sums<2>(rows, blocking));
  }

  const int64_t k_, m_, k_tiles_;
  const Blocking blocking_;
  float *const steps_, *const sums_;
  char* const codes_;
};

// middle[m * top, width up to 32s]
static void moe_int8(const Args& args, Team& team) {
  const ExpertsArgs a(args);
  const int64_t in_tiles = blocks(a.hidden, kBlockK8), middle_tiles = blocks(a.width, kBlockK8);
  const size_t grouping_bytes = Grouping::bytes(a.ids, a.experts);
  const size_t work = std::max(Int8Projection::bytes(in_tiles), Int8Projection::bytes(middle_tiles));
  char* const memory = static_cast<char*>(team.scratch(grouping_bytes + work));
  const Grouping grouping(a.ids, a.experts, memory);
  const ExpertsDeal deal(a, team);

  grouping.deal(a.width_blocks, kHiddenRows, deal.gate_up, team, [&](const Group& group, Range own) {
    const int64_t first_block = group.expert * a.width_blocks * 2;
    const float* const scales = a.gate_up[1].as<const float>() + first_block * kBlockN;
    const auto row = [&](int64_t i) { return a.x.row<const bf16>(grouping.order[group.first + i] / grouping.top); };
    Int8Projection(memory + grouping_bytes, a.hidden, group.rows)
        .run<2>(a.gate_up[0].as<const char>() + first_block * in_tiles * kBlockStep8, own, row,
                [&](int64_t first, const float* steps) {
                  return Int8GatedFinish{a.middle, group.first + first, steps, scales};
                });
  });
  team.barrier();
  grouping.deal(a.hidden_blocks, kHiddenRows, deal.down, team, [&](const Group& group, Range own) {
    const int64_t first_block = group.expert * a.hidden_blocks;
    const float* const scales = a.down[1].as<const float>() + first_block * kBlockN;
    const auto row = [&](int64_t i) { return a.middle.row<const float>(group.first + i); };
    Int8Projection(memory + grouping_bytes, a.width, group.rows)
        .run<1>(a.down[0].as<const char>() + first_block * middle_tiles * kBlockStep8, own, row,
                [&](int64_t first, const float* steps) {
                  return Int8ChoiceFinish{a.partial, grouping.order + group.first + first, steps, scales};
                });
  });
  team.barrier();
  sum_choices<bf16>(a, team);
}
TR_KERNEL(moe_int8)

}  // namespace tilerank::TR_RUNG
#endif
