// unfold: the inputs of a strided 3 x 3 convolution as rows, so that the convolution is a product.
#ifndef TR_RUNG
#include "core/kernel.h"
#define TR_SOURCE "audio/unfold.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

// tensors: x [a, b, c], out [rows, 9 * c]; ints: first row
static void unfold(const Args& args, Team& team) {
  const Tensor &x = args.tensor(0), &out = args.tensor(1);
  const int64_t height = x.size[0], width = x.size[1], channels = x.size[2], columns = (width + 1) / 2;
  const auto copy = [&](auto type) {
    using T = decltype(type);
    const auto [first, last] = team.share(channels ? out.size[0] : 0);  // without columns there may be no memory
    for (int64_t row = first; row < last; ++row) {
      const int64_t place = args.integer(0) + row, top = place / columns * 2 - 1, left = place % columns * 2 - 1;
      T* const to = out.as<T>() + row * 9 * channels;
      for (int64_t tap = 0; tap < 9; ++tap) {
        const int64_t i = top + tap % 3, j = left + tap / 3;
        if (i < 0 || i >= height || j < 0 || j >= width) {
          for (int64_t c = 0; c < channels; ++c) to[c * 9 + tap] = T{};
          continue;
        }
        const T* const from = x.as<T>() + (i * width + j) * channels;
        for (int64_t c = 0; c < channels; ++c) to[c * 9 + tap] = from[c];
      }
    }
  };
  if (x.dtype == DType::f32) {
    copy(float{});
  } else {
    copy(bf16{});
  }
}
TR_KERNEL(unfold)

}  // namespace tilerank::TR_RUNG
#endif
