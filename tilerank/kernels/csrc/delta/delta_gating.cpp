// delta_gating: log-decays and learning rates of all tokens and heads.
#ifndef TR_RUNG
#include "core/entry.h"
#define TR_SOURCE "delta/delta_gating.cpp"
#include "simd/foreach_isa.h"
#else
#include "delta/gates-inl.h"

namespace tilerank::TR_RUNG {

TR_ENTRY(delta_gating, Team& team, const Tensor& a, const Tensor& b, const Tensor& a_log, const Tensor& dt_bias,
         const Tensor& g, const Tensor& beta) {
  for_float(a.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t heads = a.size[1];
    const auto [first, last] = team.share(heads ? a.size[0] : 0);
    for (int64_t row = first; row < last; ++row) {
      write_gates(a.row<T>(row), b.row<T>(row), a_log, dt_bias, heads, g.row<float>(row), beta.row<float>(row));
    }
  });
}

}  // namespace tilerank::TR_RUNG
#endif
