// A tensor [..., d] as rows of d elements, whatever the strides of the leading dimensions.
#pragma once
#include "core/kernel.h"

namespace tilerank {

inline int64_t row_count(const Tensor& t) {
  int64_t rows = 1;
  for (int dim = 0; dim + 1 < t.ndim; ++dim) rows *= t.size[dim];
  return rows;
}

// Offset in elements of row `row`, counted in C order of the leading dimensions.
inline int64_t row_offset(const Tensor& t, int64_t row) {
  int64_t offset = 0;
  for (int dim = t.ndim - 2; dim >= 0; --dim) {
    offset += row % t.size[dim] * t.stride[dim];
    row /= t.size[dim];
  }
  return offset;
}

// Every thread checks all values before it writes, so that a wrong one stops all of them and leaves nothing
// half-written.
inline void check_indices(const char* argument, const Tensor& indices, int64_t limit) {
  for (int64_t i = 0; i < indices.size[0]; ++i) {
    const int64_t index = indices.as<int64_t>()[i * indices.stride[0]];
    if (index < 0 || index >= limit) {
      throw Error(std::string(argument) + ": expected values in [0, " + std::to_string(limit) + "), found " +
                  std::to_string(index));
    }
  }
}

}  // namespace tilerank
