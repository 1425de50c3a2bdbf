// rms_norm and add_rms_norm, row by row: the second pass over a row finds it in the cache.
#ifndef TR_RUNG
#include "core/entry.h"
#include "rows/rows.h"
#define TR_SOURCE "rows/rms_norm.cpp"
#include "simd/foreach_isa.h"
#else
#include "rows/norm-inl.h"

namespace tilerank::TR_RUNG {

TR_ENTRY(rms_norm, Team& team, const Tensor& x, const Tensor& weight, float eps, bool zero_centered,
         const Tensor& out) {
  const int64_t d = weight.size[0];
  for_float(x.dtype, [&](auto type) {
    using T = decltype(type);
    const auto [first, last] = team.share(row_count(x));
    for (int64_t row = first; row < last; ++row) {
      const T* const from = x.as<T>() + row_offset(x, row);
      norm_row(from, sum_of_squares(from, d), weight.as<T>(), out.as<T>() + row * d, d, eps, zero_centered);
    }
  });
}

TR_ENTRY(add_rms_norm, Team& team, const Tensor& x, const Tensor& residual, const Tensor& weight, float eps,
         const Tensor& post_weight, const Tensor& scale, bool zero_centered, const Tensor& out) {
  const int64_t d = weight.size[0];
  for_float(x.dtype, [&](auto type) {
    using T = decltype(type);
    const Vec factor = residual_factor(scale.as<T>());
    const auto [first, last] = team.share(x.size[0]);
    for (int64_t row = first; row < last; ++row) {
      const int64_t next = std::min(row + 1, last - 1);
      T* const sum = residual.row<T>(row);
      const NextRow<T> ahead{x.row<T>(next)};
      const T *const from = x.row<T>(row), *const by = post_weight.as<T>();
      const float squares = by ? add_normed_row(from, by, sum, d, eps, zero_centered, factor, ahead)
                               : add_row(from, sum, d, factor, ahead);
      norm_row(sum, squares, weight.as<T>(), out.row<T>(row), d, eps, zero_centered, NextRow<T>{residual.row<T>(next)});
    }
  });
}

}  // namespace tilerank::TR_RUNG
#endif
