// rope_rows: gathers the cosines and sines of a step, with which every layer rotates its heads.
#ifndef TR_RUNG
#include "core/entry.h"
#include "rows/rows.h"
#define TR_SOURCE "rows/rope_rows.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

TR_ENTRY(rope_rows, Team& team, const Tensor& table, const Tensor& positions, const Tensor& axis_of,
         const Tensor& out) {
  check_indices("rope_rows: axis_of", axis_of, positions.size[0]);
  for (int64_t axis = 0; axis < positions.size[0]; ++axis) {
    Tensor one = positions;
    one.data = positions.row<int64_t>(axis);
    one.size[0] = positions.size[1];
    one.stride[0] = positions.stride[1];
    check_indices("rope_rows: positions", one, table.size[0]);
  }
  const size_t element = table.dtype == DType::f32 ? 4 : 2;
  const int64_t* const axes = axis_of.as<int64_t>();
  const int64_t half = table.size[2];
  const auto [first, last] = team.share(out.size[0]);
  for (int64_t token = first; token < last; ++token) {
    for (int64_t i = 0, end; i < half; i = end) {  // frequencies i to end follow the same axis
      for (end = i + 1; end < half && axes[end] == axes[i];) ++end;
      const int64_t position = positions.as<int64_t>()[axes[i] * positions.stride[0] + token * positions.stride[1]];
      for (int64_t part = 0; part < 2; ++part) {
        const int64_t from = position * table.stride[0] + part * table.stride[1] + i;
        const int64_t to = (2 * token + part) * half + i;
        std::memcpy(out.as<char>() + static_cast<size_t>(to) * element,
                    table.as<char>() + static_cast<size_t>(from) * element, static_cast<size_t>(end - i) * element);
      }
    }
  }
}

}  // namespace tilerank::TR_RUNG
#endif
