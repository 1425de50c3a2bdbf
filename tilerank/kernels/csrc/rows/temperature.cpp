// scale_by_position: queries times 1 + beta * ln(1 + floor(position / original)), the factor rounded to their type.
#ifndef TR_RUNG
#include <cmath>

#include "core/entry.h"
#include "rows/rows.h"
#define TR_SOURCE "rows/temperature.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

TR_ENTRY(scale_by_position, Team& team, const Tensor& q, const Tensor& positions, float beta, int64_t original) {
  const int64_t heads = q.size[1], d = q.size[2];
  for_float(q.dtype, [&](auto type) {
    using T = decltype(type);
    const auto [first, last] = team.share(q.size[0] * heads);
    for (int64_t item = first; item < last; ++item) {
      const int64_t token = item / heads, position = positions.as<int64_t>()[token * positions.stride[0]];
      const Vec factor = round_to<T>(set(1.0f + beta * std::log(static_cast<float>(1 + position / original))));
      T* const head = q.row<T>(token) + item % heads * q.stride[1];
      for_lanes(d, [&](int64_t i, auto lanes) { lanes.store(head + i, lanes.load(head + i) * factor); });
    }
  });
}

}  // namespace tilerank::TR_RUNG
#endif
