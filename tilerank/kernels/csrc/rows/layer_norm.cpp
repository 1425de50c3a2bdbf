// layer_norm, row by row, in fp32. The mean is subtracted before values are squared, so that the variance keeps its
// digits.
#ifndef TR_RUNG
#include "core/entry.h"
#include "rows/rows.h"
#define TR_SOURCE "rows/layer_norm.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

// centered: memory for d floats.
template <class T>
static void layer_norm_row(const T* x, const T* weight, const T* bias, T* out, int64_t d, float eps, float* centered) {
  Vec total = zero();
  for_lanes(d, [&](int64_t i, auto lanes) {
    const Vec values = lanes.load(x + i);
    total = total + values;
    lanes.store(centered + i, values);
  });
  const Vec mean = set(sum(total) / static_cast<float>(d));
  Vec squares = zero();
  for_lanes(d, [&](int64_t i, auto lanes) {
    lanes.store(centered + i, lanes.load(centered + i) - mean);
    const Vec values = lanes.load(centered + i);  // zero where the row has ended
    squares = fma(values, values, squares);
  });
  const Vec scale = set(1.0f) / sqrt(set(sum(squares) / static_cast<float>(d)) + set(eps));
  for_lanes(d, [&](int64_t i, auto lanes) {
    lanes.store(out + i, fma(lanes.load(centered + i) * scale, lanes.load(weight + i), lanes.load(bias + i)));
  });
}

TR_ENTRY(layer_norm, Team& team, const Tensor& x, const Tensor& weight, const Tensor& bias, float eps,
         const Tensor& out) {
  const int64_t d = weight.size[0];
  float* const centered = static_cast<float*>(team.scratch(sizeof(float) * static_cast<size_t>(d)));
  for_float(x.dtype, [&](auto type) {
    using T = decltype(type);
    const auto [first, last] = team.share(d ? row_count(x) : 0);
    for (int64_t row = first; row < last; ++row) {
      layer_norm_row(x.as<T>() + row_offset(x, row), weight.as<T>(), bias.as<T>(), out.as<T>() + row * d, d, eps,
                     centered);
    }
  });
}

}  // namespace tilerank::TR_RUNG
#endif
