// join_queries and weigh_part: latent attention over a context of which every rank reads a part for all heads.
#ifndef TR_RUNG
#include "core/entry.h"
#include <limits>

#define TR_SOURCE "latent/latent_parts.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

TR_ENTRY(join_queries, Team& team, const Tensor& q_latent, const Tensor& q_rope, const Tensor& out) {
  const int64_t heads = q_latent.size[1], dims = q_latent.size[2], all_dims = out.size[2];
  for_float(out.dtype, [&](auto type) {
    using T = decltype(type);
    const auto [first, last] = team.share(out.size[0] * heads);
    for (int64_t item = first; item < last; ++item) {
      const int64_t row = item / heads, head = item % heads;
      T* const to = out.as<T>() + (row * out.size[1] + head) * all_dims;
      const auto copy = [&](const Tensor& from, T* part) {
        const T* const values = from.row<const T>(row) + head * from.stride[1];
        std::memcpy(static_cast<void*>(part), values, static_cast<size_t>(from.size[2]) * sizeof(T));
      };
      copy(q_latent, to);
      copy(q_rope, to + dims);
    }
  });
}

TR_ENTRY(weigh_part, Team& team, const Tensor& part, const Tensor& lse, int64_t rank, const Tensor& out) {
  const int64_t rows = part.size[0], heads = part.size[1], dims = part.size[2], ranks = lse.size[0];
  const int64_t groups = (heads + kLanes - 1) / kLanes;
  for_float(part.dtype, [&](auto type) {
    using T = decltype(type);
    const auto [first, last] = team.share(rows * groups);
    for (int64_t item = first; item < last; ++item) {
      const int64_t row = item / groups, head = item % groups * kLanes, count = std::min<int64_t>(heads - head, kLanes);
      alignas(64) float weights[kLanes];
      for_lanes(count, [&](int64_t, auto lanes) {
        const auto of = [&](int64_t i) { return lanes.load(lse.as<float>() + (i * rows + row) * heads + head); };
        Vec most = of(0), sum = zero();
        for (int64_t i = 1; i < ranks; ++i) most = max(most, of(i));
        for (int64_t i = 0; i < ranks; ++i) sum = sum + exp(of(i) - most);
        store(weights, exp(of(rank) - most) / sum);
      });
      for (int64_t i = 0; i < count; ++i) {
        const T* const from = part.row<const T>(row) + (head + i) * part.stride[1];
        T* const to = out.as<T>() + (row * heads + head + i) * dims;
        const Vec weight = set(weights[i]);
        for_lanes(dims, [&](int64_t d, auto lanes) { lanes.store(to + d, lanes.load(from + d) * weight); });
      }
    }
  });
}

}  // namespace tilerank::TR_RUNG
#endif
