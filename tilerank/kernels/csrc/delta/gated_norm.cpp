// gated_norm and sigmoid_gate: what follows the delta rule and the attention of a layer.
#ifndef TR_RUNG
#include "core/entry.h"
#include "rows/rows.h"
#define TR_SOURCE "delta/gated_norm.cpp"
#include "simd/foreach_isa.h"
#else
#include "delta/gates-inl.h"
#include "rows/norm-inl.h"

namespace tilerank::TR_RUNG {

template <class T>
static void gated_norm_head(const T* o, const T* z, const T* weight, T* out, int64_t d, Vec scale) {
  for_two(d, [&](int64_t i, auto two) {
    const Two normed = round_to<T>(norm_values<T>(two.load(o + i), scale, two.load(weight + i), false));
    const Two gate = two.load(z + i);
    two.store(out + i, normed * Two{silu(gate.a), silu(gate.b)});
  });
}

TR_ENTRY(gated_norm, Team& team, const Tensor& o, const Tensor& z, const Tensor& weight, float eps, const Tensor& out) {
  const int64_t d = weight.size[0], heads = d ? o.size[1] / d : 0;
  for_float(o.dtype, [&](auto type) {
    using T = decltype(type);
    const auto head_of = [&](const Tensor& x, int64_t item) { return x.row<T>(item / heads) + item % heads * d; };
    const auto [first, last] = team.share(o.size[0] * heads);
    // The roots of several heads at once: one after the other, they would take longer than all the rest.
    for (int64_t begin = first; begin < last; begin += kLanes) {
      const int64_t end = std::min(begin + kLanes, last);
      float scales[kLanes] = {};
      for (int64_t item = begin; item < end; ++item) scales[item - begin] = sum_of_squares(head_of(o, item), d);
      store(scales, norm_scale(load(scales), d, eps));
      for (int64_t item = begin; item < end; ++item) {
        gated_norm_head(head_of(o, item), head_of(z, item), weight.as<T>(), head_of(out, item), d,
                        set(scales[item - begin]));
      }
    }
  });
}

// gate: [..., d] or [..., 1]
TR_ENTRY(sigmoid_gate, Team& team, const Tensor& x, const Tensor& gate) {
  const int64_t d = x.size[x.ndim - 1];
  const bool by_row = gate.size[gate.ndim - 1] == 1;
  constexpr int64_t kPiece = 256;  // elements are independent, so even a single row is split over the threads
  const int64_t pieces = (d + kPiece - 1) / kPiece;
  for_float(x.dtype, [&](auto type) {
    using T = decltype(type);
    const auto [first, last] = team.share(row_count(x) * pieces);
    for (int64_t item = first; item < last; ++item) {
      const int64_t column = item % pieces * kPiece, n = std::min(kPiece, d - column);
      T* const to = x.as<T>() + row_offset(x, item / pieces) + column;
      const T* const from = gate.as<T>() + row_offset(gate, item / pieces);
      if (by_row) {
        const Vec factor = round_to<T>(sigmoid(set(to_float(*from))));
        for_two(n, [&](int64_t i, auto two) { two.store(to + i, two.load(to + i) * factor); });
      } else {
        for_two(n, [&](int64_t i, auto two) {
          const Two g = two.load(from + column + i);
          two.store(to + i, two.load(to + i) * round_to<T>(Two{sigmoid(g.a), sigmoid(g.b)}));
        });
      }
    }
  });
}

}  // namespace tilerank::TR_RUNG
#endif
