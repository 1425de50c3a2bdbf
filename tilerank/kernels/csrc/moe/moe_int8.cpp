// Fused MoE with int8 weights in vectors. x is quantised, and so is silu(gate) * up, which is kept in fp32 before.
#ifndef TR_RUNG
#include <array>
#include <type_traits>
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
#include "linear/int8_stripes-inl.h"

namespace tilerank::TR_RUNG {

// Rows are quantised and multiplied a stripe at a time. memory: the totals of a stripe with two blocks, then its codes.
template <class Form>
class Int8Product {
  using Stripe = Int8Stripe<Form>;

 public:
  using Weight = typename Form::Weight;
  using Input = bf16;
  using Middle = float;
  using Rounds = float;
  static constexpr int64_t kMemoryBoundRows = kLanes == 16 ? 24 : 4;

  static size_t bytes(const ExpertsArgs<Weight>& a) {
    const int64_t row_bytes = Stripe::row_bytes(std::max(a.hidden, a.width));
    return Stripe::kTotalsBytes + static_cast<size_t>(Stripe::kMostRows * row_bytes);
  }
  Int8Product(const ExpertsArgs<Weight>&, char* memory) : memory_(memory) {}

  template <int kParts, class Row, class To>
  void multiply(const Weight& w, int64_t k, int64_t m, Range own, const Row& row, const To& to) const {
    for (int64_t first = 0; first < m; first += Stripe::kMostRows) {
      const Stripe stripe{memory_ + Stripe::kTotalsBytes, std::min(Stripe::kMostRows, m - first), k};
      stripe.put({0, stripe.rows}, [&](int64_t i) { return row(first + i); });
      for (int64_t result = own.begin; result < own.end; ++result) {
        const auto emit = [&](int64_t i, const Vec32& values, const Vec32& up) {
          to.write(first + i, result, values, up);
        };
        stripe.multiply(w, result * kParts, kParts, memory_, emit);
      }
    }
  }

 private:
  char* const memory_;
};

TR_MOE(int8, Int8Weight, RowExperts<Int8Product<Int8Form> >)
TR_MOE(token_int8, Int8Weight, RowExperts<Int8Product<TokenInt8Form> >)

}  // namespace tilerank::TR_RUNG
#endif
