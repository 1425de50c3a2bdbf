#ifndef TR_RUNG
#include "kernel.h"

#define TR_SOURCE "silu_mul.cpp"
#include "foreach_isa.h"

#else

namespace tilerank::TR_RUNG {

// out[m, i] = round(silu(gate)) * up, with gate_up[m, 2 * i] = gate | up: the two roundings of the reference.
template <class T>
static void silu_mul_rows(const Tensor& gate_up, const Tensor& out, Range rows) {
  const int64_t width = out.size[1];
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const T* gate = gate_up.row<const T>(row);
    const T* up = gate + width;
    T* result = out.row<T>(row);
    for (int64_t i = 0; i < width; i += kLanes) {
      const int64_t n = std::min<int64_t>(kLanes, width - i);
      const Vec x = load(gate + i, n);
      const Vec silu = round_to<T>(x / (set(1.0f) + exp(zero() - x)));
      store(result + i, silu * load(up + i, n), n);
    }
  }
}

// tensors: gate_up[m, 2 * i], out[m, i]
static void silu_mul(const Args& args, Team& team) {
  const Tensor &gate_up = args.tensor(0), &out = args.tensor(1);
  for_float(out.dtype, [&](auto type) { silu_mul_rows<decltype(type)>(gate_up, out, team.share(out.size[0])); });
}
TR_KERNEL(silu_mul)

}  // namespace tilerank::TR_RUNG
#endif
