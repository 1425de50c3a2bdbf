// convolve_channels: a convolution of each channel alone, in fp32.
#ifndef TR_RUNG
#include "core/entry.h"
#define TR_SOURCE "convolution/convolve_channels.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

TR_ENTRY(convolve_channels, Team& team, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out) {
  const auto [first, last] = team.share(out.size[0]);
  for_float(x.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t row = first; row < last; ++row) {
      for_lanes(out.size[1], [&](int64_t i, auto lanes) {
        Vec total = lanes.load(bias.as<const T>() + i);
        for (int64_t tap = 0; tap < weight.size[0]; ++tap) {
          total = fma(lanes.load(weight.row<const T>(tap) + i), lanes.load(x.row<const T>(row + tap) + i), total);
        }
        lanes.store(out.row<T>(row) + i, total);
      });
    }
  });
}

}  // namespace tilerank::TR_RUNG
#endif
