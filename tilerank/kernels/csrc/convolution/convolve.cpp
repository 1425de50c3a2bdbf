// convolve: causal convolutions over rows, as products of shifted rows with a packed weight, and what follows them.
#ifndef TR_RUNG
#include <array>

#include "core/cpu.h"
#include "core/entry.h"
#include "linear/pack.h"

#define TR_SOURCE "convolution/convolve.cpp"
#include "simd/foreach_isa.h"

#else
#include "simd/blocks-inl.h"
#include "linear/panels-inl.h"
#include "convolution/finish-inl.h"
#include "convolution/stripes-inl.h"
#include "convolution/taps-inl.h"

namespace tilerank::TR_RUNG {

template <class T>
static void convolve(const ShiftedRows<T>& rows, const T* weight, const Finish& finish, Team& team) {
  auto* const packed = static_cast<Unit<T>*>(team.scratch(rows.bytes()));
  for_stripes(
      rows.stripes(), blocks(finish.columns, kBlockN), team, [&](int64_t stripe) { rows.pack(stripe, packed); },
      [&](int64_t stripe, int64_t block, int64_t) {
        rows.multiply(
            stripe, packed, weight + block * rows.block_elements(),
            [&](int64_t row, const float* sums, int64_t count) { finish.write(row, count, block * kBlockN, sums); });
      });
}

TR_ENTRY(convolve_f32, Team& team, const Tensor& x, const Tensor& bias, int64_t taps, int64_t dilation,
         const Tensor& scale, const Tensor& residual, const Tensor& out, const Tensor& frequency,
         const Tensor& magnitude, const Tensor& activated, const FloatWeight& w) {
  convolve<float>({x, taps, dilation}, w.data.as<const float>(),
                  {bias, scale, residual, out, frequency, magnitude, activated}, team);
}

TR_ENTRY(convolve_bf16, Team& team, const Tensor& x, const Tensor& bias, int64_t taps, int64_t dilation,
         const Tensor& scale, const Tensor& residual, const Tensor& out, const Tensor& frequency,
         const Tensor& magnitude, const Tensor& activated, const FloatWeight& w) {
  convolve<bf16>({x, taps, dilation}, w.data.as<const bf16>(),
                 {bias, scale, residual, out, frequency, magnitude, activated}, team);
}

}  // namespace tilerank::TR_RUNG
#endif
