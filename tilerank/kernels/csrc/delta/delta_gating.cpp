// delta_gating: log-decays and learning rates of all tokens and heads.
#ifndef TR_RUNG
#include "core/kernel.h"
#define TR_SOURCE "delta/delta_gating.cpp"
#include "simd/foreach_isa.h"
#else
#include "delta/gates-inl.h"

namespace tilerank::TR_RUNG {

// tensors: a, b, a_log, dt_bias, g, beta
static void delta_gating(const Args& args, Team& team) {
  const Tensor &a = args.tensor(0), &b = args.tensor(1), &g = args.tensor(4), &beta = args.tensor(5);
  for_float(a.dtype, [&](auto type) {
    using T = decltype(type);
    const auto [first, last] = team.share(a.size[1] ? a.size[0] : 0);
    for (int64_t row = first; row < last; ++row) {
      for_lanes(a.size[1], [&](int64_t head, auto lanes) {
        const Gates found = gates(a.row<T>(row), b.row<T>(row), args.tensor(2), args.tensor(3), head, lanes);
        lanes.store(g.row<float>(row) + head, found.g);
        lanes.store(beta.row<float>(row) + head, found.beta);
      });
    }
  });
}
TR_KERNEL(delta_gating)

}  // namespace tilerank::TR_RUNG
#endif
