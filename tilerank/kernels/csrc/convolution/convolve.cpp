// convolve: causal convolutions over rows, as products of shifted rows with a packed weight, and what follows them.
#ifndef TR_RUNG
#include "core/cpu.h"
#include "core/kernel.h"
#include "linear/pack.h"

#define TR_SOURCE "convolution/convolve.cpp"
#include "simd/foreach_isa.h"

#else
#include "linear/panels-inl.h"
#include "convolution/finish-inl.h"
#include "convolution/stripes-inl.h"
#include "convolution/taps-inl.h"

namespace tilerank::TR_RUNG {

// tensors: x, bias or none, scale or none, residual or none, out or none, frequency and magnitude or none, activated or
//          none, the packed weight
// ints: taps, dilation
template <class T>
static void convolve(const Args& args, Team& team) {
  const Finish finish(args);
  const ShiftedRows<T> rows(args.tensor(0), args.integer(0), args.integer(1));
  const T* const weight = args.tensor(8).as<const T>();
  auto* const packed = static_cast<Unit<T>*>(team.scratch(rows.bytes()));
  for_stripes(
      rows.stripes(), blocks(finish.columns, kBlockN), team, [&](int64_t stripe) { rows.pack(stripe, packed); },
      [&](int64_t stripe, int64_t block, int64_t) {
        rows.multiply(
            stripe, packed, weight + block * rows.block_elements(),
            [&](int64_t row, const float* sums, int64_t count) { finish.write(row, count, block * kBlockN, sums); });
      });
}

static void convolve_f32(const Args& args, Team& team) { convolve<float>(args, team); }
TR_KERNEL(convolve_f32)

static void convolve_bf16(const Args& args, Team& team) { convolve<bf16>(args, team); }
TR_KERNEL(convolve_bf16)

}  // namespace tilerank::TR_RUNG
#endif
