// take_rows, repeat_row and join_columns: copies of rows and columns.
#ifndef TR_RUNG
#include "core/entry.h"
#include "rows/rows.h"
#define TR_SOURCE "rows/rearrange.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

static inline size_t element_size(const Tensor& t) { return t.dtype == DType::f32 ? 4 : 2; }

TR_ENTRY(take_rows, Team& team, const Tensor& x, const Tensor& rows, const Tensor& out) {
  check_indices("take_rows: rows", rows, x.size[0]);
  const size_t element = element_size(x), bytes = static_cast<size_t>(x.size[1]) * element;
  const auto [first, last] = team.share(bytes ? out.size[0] : 0);  // without columns there may be no memory
  for (int64_t i = first; i < last; ++i) {
    const int64_t row = rows.as<int64_t>()[i * rows.stride[0]];
    std::memcpy(out.as<char>() + static_cast<size_t>(i) * bytes,
                x.as<char>() + static_cast<size_t>(row * x.stride[0]) * element, bytes);
  }
}

// row: none for zeros.
TR_ENTRY(repeat_row, Team& team, const Tensor& row, const Tensor& out) {
  const size_t bytes = static_cast<size_t>(out.size[1]) * element_size(out);
  const auto [first, last] = team.share(bytes ? out.size[0] : 0);  // without columns there may be no memory
  for (int64_t i = first; i < last; ++i) {
    char* const to = out.as<char>() + static_cast<size_t>(i) * bytes;
    if (row) {
      std::memcpy(to, row.data, bytes);
    } else {
      std::memset(to, 0, bytes);
    }
  }
}

TR_ENTRY(join_columns, Team& team, const Tensor& parts, const Tensor& starts, const Tensor& out) {
  const int64_t* const start = starts.as<int64_t>();
  for (int64_t r = 0; r < parts.size[0]; ++r) {
    const int64_t width = start[r + 1] - start[r];
    if (width < 0 || width > parts.size[2] || start[0] != 0 || start[parts.size[0]] != out.size[1]) {
      throw Error("join_columns: starts: expected ascending columns from 0 to " + std::to_string(out.size[1]) +
                  " at most " + std::to_string(parts.size[2]) + " apart, found " + std::to_string(start[r]) + " to " +
                  std::to_string(start[r + 1]) + " of part " + std::to_string(r));
    }
  }
  const size_t element = element_size(out);
  // A vocabulary is wide and a batch may have one row, so threads share rows, in pieces.
  constexpr int64_t kPiece = 4096;
  const int64_t pieces = (parts.size[2] + kPiece - 1) / kPiece;
  const auto [first, last] = team.share(parts.size[0] * out.size[0] * pieces);
  for (int64_t item = first; item < last; ++item) {
    const int64_t column = item % pieces * kPiece, row = item / pieces % out.size[0], r = item / pieces / out.size[0];
    const int64_t width = std::min(start[r + 1] - start[r] - column, kPiece);
    if (width <= 0) continue;
    const int64_t from = r * parts.stride[0] + row * parts.stride[1] + column;
    std::memcpy(out.as<char>() + static_cast<size_t>(row * out.size[1] + start[r] + column) * element,
                parts.as<char>() + static_cast<size_t>(from) * element, static_cast<size_t>(width) * element);
  }
}

}  // namespace tilerank::TR_RUNG
#endif
