// embedding: copies rows, zeros for ids that this shard does not hold.
#ifndef TR_RUNG
#include "core/entry.h"
#include "rows/rows.h"
#define TR_SOURCE "rows/embedding.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

TR_ENTRY(embedding, Team& team, const Tensor& ids, const Tensor& weight, int64_t first_row, const Tensor& out) {
  const size_t element = weight.dtype == DType::f32 ? 4 : 2;
  const size_t bytes = static_cast<size_t>(weight.size[1]) * element;
  const auto [first, last] = team.share(bytes ? ids.size[0] : 0);  // without columns there may be no memory
  for (int64_t i = first; i < last; ++i) {
    const int64_t row = ids.as<int64_t>()[i * ids.stride[0]] - first_row;
    char* const to = out.as<char>() + static_cast<size_t>(i) * bytes;
    if (row < 0 || row >= weight.size[0]) {
      std::memset(to, 0, bytes);
    } else {
      std::memcpy(to, weight.as<char>() + static_cast<size_t>(row * weight.stride[0]) * element, bytes);
    }
  }
}

}  // namespace tilerank::TR_RUNG
#endif
