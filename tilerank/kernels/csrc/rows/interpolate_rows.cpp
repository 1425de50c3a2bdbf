// interpolate_rows: weighted sums of four rows of a table; products and sums are fp32, in order.
#ifndef TR_RUNG
#include "core/entry.h"
#include "rows/rows.h"
#define TR_SOURCE "rows/interpolate_rows.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

TR_ENTRY(interpolate_rows, Team& team, const Tensor& table, const Tensor& rows, const Tensor& weights,
         const Tensor& out) {
  for (int64_t tap = 0; tap < 4; ++tap) {
    Tensor one = rows;
    one.data = rows.as<int64_t>() + tap;
    check_indices("interpolate_rows: rows", one, table.size[0]);
  }
  const int64_t d = table.size[1];
  for_float(table.dtype, [&](auto type) {
    using T = decltype(type);
    const auto [first, last] = team.share(d ? out.size[0] : 0);  // without columns there may be no memory
    for (int64_t row = first; row < last; ++row) {
      const int64_t* const from = rows.row<int64_t>(row);
      const float* const weight = weights.row<float>(row);
      const T* const taps[4] = {table.row<T>(from[0]), table.row<T>(from[1]), table.row<T>(from[2]),
                                table.row<T>(from[3])};
      T* const to = out.as<T>() + row * d;
      for_two(d, [&](int64_t i, auto two) {
        Two total = two.load(taps[0] + i) * set(weight[0]);
        for (int tap = 1; tap < 4; ++tap) total = total + two.load(taps[tap] + i) * set(weight[tap]);
        two.store(to + i, total);
      });
    }
  });
}

}  // namespace tilerank::TR_RUNG
#endif
