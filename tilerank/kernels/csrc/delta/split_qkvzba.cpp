// split_qkvzba: the column ranges of a matrix as matrices of their own.
#ifndef TR_RUNG
#include "core/kernel.h"
#define TR_SOURCE "delta/split_qkvzba.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

// tensors: x, then the parts in the order of their columns
static void split_qkvzba(const Args& args, Team& team) {
  const Tensor& x = args.tensor(0);
  const size_t element = x.dtype == DType::f32 ? 4 : 2;
  const auto [first, last] = team.share(x.size[1] ? x.size[0] : 0);  // without columns there may be no memory
  for (int64_t row = first; row < last; ++row) {
    const char* from = x.as<char>() + static_cast<size_t>(row * x.stride[0]) * element;
    for (int i = 1; i < args.num_tensors; ++i) {
      const Tensor& part = args.tensor(i);
      const size_t bytes = static_cast<size_t>(part.size[1]) * element;
      std::memcpy(part.as<char>() + static_cast<size_t>(row) * bytes, from, bytes);
      from += bytes;
    }
  }
}
TR_KERNEL(split_qkvzba)

}  // namespace tilerank::TR_RUNG
#endif
