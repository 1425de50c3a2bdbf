// embedding: copies rows, zeros for ids that this shard does not hold.
#ifndef TR_RUNG
#include "rows/rows.h"
#define TR_SOURCE "rows/embedding.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

// tensors: ids, weight, out; ints: first_row
static void embedding(const Args& args, Team& team) {
  const Tensor &ids = args.tensor(0), &weight = args.tensor(1), &out = args.tensor(2);
  const size_t element = weight.dtype == DType::f32 ? 4 : 2;
  const size_t bytes = static_cast<size_t>(weight.size[1]) * element;
  const auto [first, last] = team.share(bytes ? ids.size[0] : 0);  // without columns there may be no memory
  for (int64_t i = first; i < last; ++i) {
    const int64_t row = ids.as<int64_t>()[i * ids.stride[0]] - args.integer(0);
    char* const to = out.as<char>() + static_cast<size_t>(i) * bytes;
    if (row < 0 || row >= weight.size[0]) {
      std::memset(to, 0, bytes);
    } else {
      std::memcpy(to, weight.as<char>() + static_cast<size_t>(row * weight.stride[0]) * element, bytes);
    }
  }
}
TR_KERNEL(embedding)

}  // namespace tilerank::TR_RUNG
#endif
