// Products of experts with block-scaled weights in vectors, compiled once per rung (no include guard).
#include "simd/blocks-inl.h"
#include "moe/experts-inl.h"
#include "block_scaled/block_scaled_rows-inl.h"

namespace tilerank::TR_RUNG {

// Rows are packed and multiplied a stripe at a time.
template <class Format>
class BlockScaledProduct {
 public:
  using Weight = typename Format::Weight;
  using Input = bf16;
  using Middle = bf16;
  using Rounds = float;
  static constexpr int64_t kMemoryBoundRows = kWholeBlockRows;

  static size_t bytes(const ExpertsArgs<Weight>& a) {
    const int64_t rows = std::min(a.ids.size[0] * a.ids.size[1], kStripeRows);
    return sizeof(BlockScaledScratch) + std::max(BlockScaledRows::bytes(rows, a.hidden, Format(a.gate_up).k_blocks),
                                                 BlockScaledRows::bytes(rows, a.width, Format(a.down).k_blocks));
  }
  BlockScaledProduct(const ExpertsArgs<Weight>&, char* memory) : memory_(memory) {}

  template <int kParts, class Row, class To>
  void multiply(const Weight& w, int64_t k, int64_t m, Range own, const Row& row, const To& to) const {
    const Format weight(w);
    for (int64_t first = 0; first < m; first += kStripeRows) {
      const BlockScaledRows packed(memory_ + sizeof(BlockScaledScratch), std::min(kStripeRows, m - first), k, weight);
      packed.pack([&](int64_t i) { return row(first + i); }, weight, Team(nullptr, 0, 1));
      multiply_results<kParts>(packed, {0, packed.panels.panels}, weight, own, k, memory_,
                               [&](int64_t i, int64_t result, const float* const(&totals)[kParts]) {
                                 to.write(first + i, result, load32(totals[0]), load32(totals[kParts - 1]));
                               });
    }
  }

 private:
  char* const memory_;
};

}  // namespace tilerank::TR_RUNG
