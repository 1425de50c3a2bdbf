// head_squares adds up the squares of all heads of q, and of k; joint_norm divides every head by the root of their
// mean. Between the two, the ranks add up their sums, because each has some of the heads.
#ifndef TR_RUNG
#include "core/entry.h"
#include "rows/rows.h"
#define TR_SOURCE "rows/joint_norm.cpp"
#include "simd/foreach_isa.h"
#else
#include "rows/norm-inl.h"

namespace tilerank::TR_RUNG {

TR_ENTRY(head_squares, Team& team, const Tensor& q, const Tensor& k, int64_t first_key, const Tensor& out) {
  const int64_t d = q.size[2];
  for_float(q.dtype, [&](auto type) {
    using T = decltype(type);
    const auto total = [&](const Tensor& heads, int64_t first_head, int64_t token) {
      float squares = 0;
      for (int64_t head = first_head; head < heads.size[1]; ++head) {
        squares += sum_of_squares(heads.row<T>(token) + head * heads.stride[1], d);
      }
      return squares;
    };
    const auto [first, last] = team.share(2 * q.size[0]);
    for (int64_t item = first; item < last; ++item) {
      out.as<float>()[item] = item % 2 ? total(k, first_key, item / 2) : total(q, 0, item / 2);
    }
  });
}

TR_ENTRY(joint_norm, Team& team, const Tensor& q, const Tensor& k, const Tensor& q_weight, const Tensor& k_weight,
         const Tensor& squares, int64_t q_width, int64_t k_width, float eps) {
  const int64_t d = q.size[2], q_heads = q.size[1], heads = q_heads + k.size[1];
  for_float(q.dtype, [&](auto type) {
    using T = decltype(type);
    const auto [first, last] = team.share(q.size[0] * heads);
    for (int64_t item = first; item < last; ++item) {
      const int64_t token = item / heads;
      const bool of_k = item % heads >= q_heads;
      const int64_t head = item % heads - (of_k ? q_heads : 0);
      const Tensor& from = of_k ? k : q;
      T* const x = from.row<T>(token) + head * from.stride[1];
      const T* const weight = (of_k ? k_weight : q_weight).row<T>(head);
      const Vec scale = norm_scale(set(squares.row<float>(token)[of_k]), of_k ? k_width : q_width, eps);
      for_two(d, [&](int64_t i, auto two) {
        two.store(x + i, norm_values<T>(two.load(x + i), scale, two.load(weight + i), false));
      });
    }
  });
}

}  // namespace tilerank::TR_RUNG
#endif
