// silu_mul and gelu_tanh_mul: the activation of gate in fp32, rounded to the activation dtype, times up.
#ifndef TR_RUNG
#include "core/entry.h"
#include "rows/rows.h"
#define TR_SOURCE "rows/gated.cpp"
#include "simd/foreach_isa.h"
#else
#include "simd/activations-inl.h"

namespace tilerank::TR_RUNG {

// Calls activate(gate) -> Vec for the values of gate.
template <class F>
static void gated_rows(Team& team, const Tensor& gate_up, const Tensor& out, const F& activate) {
  const int64_t width = out.size[1];
  // Elements are independent, so even a single row is split over the threads, in pieces of a few cache lines.
  constexpr int64_t kPiece = 256;
  const int64_t pieces = (width + kPiece - 1) / kPiece;
  for_float(gate_up.dtype, [&](auto type) {
    using T = decltype(type);
    const auto [first, last] = team.share(gate_up.size[0] * pieces);
    for (int64_t item = first; item < last; ++item) {
      const int64_t row = item / pieces, column = item % pieces * kPiece;
      const T* const gate = gate_up.row<T>(row) + column;
      T* const to = out.as<T>() + row * width + column;
      for_two(std::min(kPiece, width - column), [&](int64_t i, auto two) {
        const Two x = two.load(gate + i);
        two.store(to + i, round_to<T>(Two{activate(x.a), activate(x.b)}) * two.load(gate + width + i));
      });
    }
  });
}

TR_ENTRY(silu_mul, Team& team, const Tensor& gate_up, const Tensor& out) {
  gated_rows(team, gate_up, out, [](Vec x) { return silu(x); });
}

TR_ENTRY(gelu_tanh_mul, Team& team, const Tensor& gate_up, const Tensor& out) {
  gated_rows(team, gate_up, out, [](Vec x) { return gelu_tanh(x); });
}

}  // namespace tilerank::TR_RUNG
#endif
