// unfold: the inputs of a strided 3 x 3 convolution as rows, so that the convolution is a product. Channels are
// adjacent in the input and in the rows, so that three places in a row are one copy.
#ifndef TR_RUNG
#include "core/entry.h"
#include <algorithm>
#include <cstring>

#define TR_SOURCE "audio/unfold.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

TR_ENTRY(unfold, Team& team, const Tensor& x, int64_t first, const Tensor& out) {
  const int64_t height = x.size[0], width = x.size[1], columns = (width + 1) / 2;
  const auto item = static_cast<int64_t>(x.dtype == DType::f32 ? sizeof(float) : sizeof(bf16));
  const auto place = static_cast<size_t>(x.size[2] * item);
  if (!place) return;  // there may be no memory
  const auto [begin, end] = team.share(out.size[0]);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t number = first + row, top = number / columns * 2 - 1, left = number % columns * 2 - 1;
    const int64_t from = std::max<int64_t>(left, 0), last = std::min(left + 3, width);
    const auto before = static_cast<size_t>(from - left) * place, inside = static_cast<size_t>(last - from) * place;
    char* to = out.as<char>() + row * out.stride[0] * item;
    for (int64_t i = top; i < top + 3; ++i, to += 3 * place) {
      if (i < 0 || i >= height) {
        std::memset(to, 0, 3 * place);
        continue;
      }
      std::memset(to, 0, before);
      std::memcpy(to + before, x.as<char>() + static_cast<size_t>(i * width + from) * place, inside);
      std::memset(to + before + inside, 0, 3 * place - before - inside);
    }
  }
}

}  // namespace tilerank::TR_RUNG
#endif
