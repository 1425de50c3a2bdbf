// silu_mul: silu in fp32 rounded to the activation dtype, times up.
#ifndef TR_RUNG
#include "core/entry.h"
#include "rows/rows.h"
#define TR_SOURCE "rows/silu_mul.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

template <class T>
static void silu_mul_row(const T* gate, const T* up, T* out, int64_t n) {
  for_two(n, [&](int64_t i, auto two) {
    const Two x = two.load(gate + i);
    two.store(out + i, round_to<T>(Two{silu(x.a), silu(x.b)}) * two.load(up + i));
  });
}

TR_ENTRY(silu_mul, Team& team, const Tensor& gate_up, const Tensor& out) {
  const int64_t width = out.size[1];
  // Elements are independent, so even a single row is split over the threads, in pieces of a few cache lines.
  constexpr int64_t kPiece = 256;
  const int64_t pieces = (width + kPiece - 1) / kPiece;
  for_float(gate_up.dtype, [&](auto type) {
    using T = decltype(type);
    const auto [first, last] = team.share(gate_up.size[0] * pieces);
    for (int64_t item = first; item < last; ++item) {
      const int64_t row = item / pieces, column = item % pieces * kPiece;
      const T* gate = gate_up.row<T>(row) + column;
      silu_mul_row(gate, gate + width, out.as<T>() + row * width + column, std::min(kPiece, width - column));
    }
  });
}

}  // namespace tilerank::TR_RUNG
#endif
