// Fused MoE with bf16 and fp32 weights in vectors.
#ifndef TR_RUNG
#include <array>

#include "core/cpu.h"
#include "moe/experts.h"
#define TR_SOURCE "moe/moe.cpp"
#include "simd/foreach_isa.h"
#else
#include "simd/blocks-inl.h"
#include "moe/experts-inl.h"
#include "linear/panels-inl.h"
#include "linear/products-inl.h"

namespace tilerank::TR_RUNG {

template <class T>
class FloatProduct {
 public:
  using Weight = FloatWeight;
  using Arguments = ExpertsArgs<Weight>;
  using Input = T;
  using Middle = T;
  using Rounds = T;
  static constexpr int64_t kMemoryBoundRows = kLanes;

  static size_t bytes(const Arguments& a) {
    return products_bytes<T>(chunk(a)) + RowPanels<T>::bytes(chunk(a), std::max(a.hidden, a.width));
  }
  FloatProduct(const Arguments& a, char* memory) : chunk_(chunk(a)), memory_(memory) {}

  template <int kParts, class Row, class To>
  void multiply(const Weight& w, int64_t k, int64_t m, Range own, const Row& row, const To& to) const {
    const PackedBlocks<T> blocks{w.data.as<const T>(), k};
    for (int64_t first = 0; first < m; first += chunk_) {
      const RowPanels<T> panels(memory_ + products_bytes<T>(chunk_), std::min(chunk_, m - first), k);
      panels.pack_all([&](int64_t i) { return row(first + i); });
      multiply_results(panels, blocks, kParts, own, memory_,
                       [&](int64_t i, int64_t result, const float* sums, const float* last) {
                         to.write(first + i, result, load32(sums), load32(last));
                       });
    }
  }

 private:
  // Rows that are multiplied at a time.
  static int64_t chunk(const Arguments& a) { return std::min(a.ids.size[0] * a.ids.size[1], kStripe * kPanelRows); }

  const int64_t chunk_;
  char* const memory_;
};

TR_MOE(f32, FloatWeight, RowExperts<FloatProduct<float> >)
TR_MOE(bf16, FloatWeight, RowExperts<FloatProduct<bf16> >)

}  // namespace tilerank::TR_RUNG
#endif
