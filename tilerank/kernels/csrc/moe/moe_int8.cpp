// Fused MoE with int8 weights in vectors. x is quantised, and so is silu(gate) * up, which is kept in fp32 before.
#ifndef TR_RUNG
#include <array>
#include <utility>

#include "core/cpu.h"
#include "moe/experts.h"
#include "linear/int8.h"
#define TR_SOURCE "moe/moe_int8.cpp"
#include "simd/foreach_isa.h"
#else
#include "simd/blocks-inl.h"
#include "moe/experts-inl.h"
#include "linear/int8_rows-inl.h"
#include "linear/gemm_int8-inl.h"

namespace tilerank::TR_RUNG {

// Rows are quantised and multiplied a stripe at a time. memory: the sums of a stripe with two blocks, then its codes.
class Int8Product {
 public:
  using Weight = Int8Weight;
  using Input = bf16;
  using Middle = float;
  using Rounds = float;
  static constexpr int64_t kMemoryBoundRows = kLanes == 16 ? 24 : 4;

  static size_t bytes(const ExpertsArgs<Weight>& a) {
    const int64_t row_bytes = Int8Stripe::row_bytes(std::max(a.hidden, a.width));
    return Int8Stripe::kSums * sizeof(Ints) + static_cast<size_t>(Int8Stripe::kMostRows * row_bytes);
  }
  Int8Product(const ExpertsArgs<Weight>&, char* memory) : memory_(memory) {}

  template <int kParts, class Row, class To>
  void multiply(const Weight& w, int64_t k, int64_t m, Range own, const Row& row, const To& to) const {
    Ints* const sums = reinterpret_cast<Ints*>(memory_);
    float row_scales[Int8Stripe::kMostRows];
    for (int64_t first = 0; first < m; first += Int8Stripe::kMostRows) {
      const Int8Stripe stripe{memory_ + Int8Stripe::kSums * sizeof(Ints), std::min(Int8Stripe::kMostRows, m - first),
                              k};
      stripe.put({0, stripe.rows}, [&](int64_t i) { return row(first + i); }, row_scales);
      for (int64_t result = own.begin; result < own.end; ++result) {
        const auto emit = [&](int64_t i, const Vec32& values, const Vec32& up) {
          to.write(first + i, result, values, up);
        };
        stripe.multiply(w, result * kParts, kParts, sums, row_scales, emit);
      }
    }
  }

 private:
  char* const memory_;
};

TR_MOE(int8, Int8Weight, RowExperts<Int8Product>)

}  // namespace tilerank::TR_RUNG
#endif
