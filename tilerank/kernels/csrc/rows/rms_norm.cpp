// rms_norm and add_rms_norm, row by row: the second pass over a row finds it in the cache.
#ifndef TR_RUNG
#include "rows/rows.h"
#define TR_SOURCE "rows/rms_norm.cpp"
#include "simd/foreach_isa.h"
#else
#include "rows/norm-inl.h"

namespace tilerank::TR_RUNG {

// tensors: x, weight, out; ints: zero_centered; floats: eps
static void rms_norm(const Args& args, Team& team) {
  const Tensor &x = args.tensor(0), &weight = args.tensor(1), &out = args.tensor(2);
  const int64_t d = weight.size[0];
  for_float(x.dtype, [&](auto type) {
    using T = decltype(type);
    const auto [first, last] = team.share(row_count(x));
    for (int64_t row = first; row < last; ++row) {
      const T* const from = x.as<T>() + row_offset(x, row);
      norm_row(from, sum_of_squares(from, d), weight.as<T>(), out.as<T>() + row * d, d, args.real(0),
               args.integer(0) != 0);
    }
  });
}
TR_KERNEL(rms_norm)

// tensors: x, residual, weight, out; ints: zero_centered; floats: eps
static void add_rms_norm(const Args& args, Team& team) {
  const Tensor &x = args.tensor(0), &residual = args.tensor(1), &weight = args.tensor(2), &out = args.tensor(3);
  const int64_t d = weight.size[0];
  for_float(x.dtype, [&](auto type) {
    using T = decltype(type);
    const auto [first, last] = team.share(x.size[0]);
    for (int64_t row = first; row < last; ++row) {
      const int64_t next = std::min(row + 1, last - 1);
      T* const sum = residual.row<T>(row);
      const float squares = add_row(x.row<T>(row), sum, d, NextRow<T>{x.row<T>(next)});
      norm_row(sum, squares, weight.as<T>(), out.row<T>(row), d, args.real(0), args.integer(0) != 0,
               NextRow<T>{residual.row<T>(next)});
    }
  });
}
TR_KERNEL(add_rms_norm)

}  // namespace tilerank::TR_RUNG
#endif
