// join_queries and weigh_part: latent attention over a context of which every rank reads a part for all heads.
#ifndef TR_RUNG
#include <limits>

#include "core/kernel.h"
#define TR_SOURCE "latent/latent_parts.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

// tensors: q_latent[t, heads, latent], q_rope[t, heads, rope], out[t, most, latent + rope] contiguous, most >= heads
static void join_queries(const Args& args, Team& team) {
  const Tensor &q_latent = args.tensor(0), &q_rope = args.tensor(1), &out = args.tensor(2);
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
TR_KERNEL(join_queries)

// tensors: part[t, heads, dims], lse[ranks, t, heads] f32 contiguous, out[t, heads, dims] contiguous; ints: rank
static void weigh_part(const Args& args, Team& team) {
  const Tensor &part = args.tensor(0), &lse = args.tensor(1), &out = args.tensor(2);
  const int64_t rows = part.size[0], heads = part.size[1], dims = part.size[2], ranks = lse.size[0];
  const int64_t groups = (heads + kLanes - 1) / kLanes;
  for_float(part.dtype, [&](auto type) {
    using T = decltype(type);
    const auto [first, last] = team.share(rows * groups);
    for (int64_t item = first; item < last; ++item) {
      const int64_t row = item / groups, head = item % groups * kLanes, count = std::min<int64_t>(heads - head, kLanes);
      alignas(64) float weights[kLanes];
      for_lanes(count, [&](int64_t, auto lanes) {
        const auto of = [&](int64_t rank) { return lanes.load(lse.as<float>() + (rank * rows + row) * heads + head); };
        Vec most = of(0), sum = zero();
        for (int64_t rank = 1; rank < ranks; ++rank) most = max(most, of(rank));
        for (int64_t rank = 0; rank < ranks; ++rank) sum = sum + exp(of(rank) - most);
        store(weights, exp(of(args.integer(0)) - most) / sum);
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
TR_KERNEL(weigh_part)

}  // namespace tilerank::TR_RUNG
#endif
