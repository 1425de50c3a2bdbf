// rms_norm and add_rms_norm: one row after the other, the row in cache between the two passes.
#ifndef TR_RUNG
#include "rows.h"
#define TR_SOURCE "rms_norm.cpp"
#include "foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

template <class T>
static float sum_of_squares(const T* x, int64_t d) {
  Vec even = zero(), odd = zero();
  int64_t i = 0;
  for (; i + 2 * kLanes <= d; i += 2 * kLanes) {
    const Vec a = load(x + i), b = load(x + i + kLanes);
    even = fma(a, a, even);
    odd = fma(b, b, odd);
  }
  for (; i < d; i += kLanes) {
    const Vec a = d - i < kLanes ? load(x + i, d - i) : load(x + i);
    even = fma(a, a, even);
  }
  return sum(even + odd);
}

template <class T>
static void norm_row(const T* x, const T* weight, T* out, int64_t d, float eps, bool zero_centered) {
  const Vec scale = set(1.0f / std::sqrt(sum_of_squares(x, d) / static_cast<float>(d) + eps));
  const auto normed = [&](Vec value, Vec w) {
    return zero_centered ? value * scale * (set(1.0f) + w) : round_to<T>(value * scale) * w;
  };
  int64_t i = 0;
  for (; i + kLanes <= d; i += kLanes) store(out + i, normed(load(x + i), load(weight + i)));
  if (i < d) store(out + i, normed(load(x + i, d - i), load(weight + i, d - i)), d - i);
}

template <class T>
static void add_row(const T* x, T* residual, int64_t d) {
  int64_t i = 0;
  for (; i + kLanes <= d; i += kLanes) store(residual + i, load(residual + i) + load(x + i));
  if (i < d) store(residual + i, load(residual + i, d - i) + load(x + i, d - i), d - i);
}

// tensors: x, weight, out; ints: zero_centered; floats: eps
static void rms_norm(const Args& args, Team& team) {
  const Tensor &x = args.tensor(0), &weight = args.tensor(1), &out = args.tensor(2);
  const int64_t d = weight.size[0];
  for_float(x.dtype, [&](auto type) {
    using T = decltype(type);
    const auto [first, last] = team.share(row_count(x));
    for (int64_t row = first; row < last; ++row) {
      norm_row(x.as<T>() + row_offset(x, row), weight.as<T>(), out.as<T>() + row * d, d, args.real(0),
               args.integer(0) != 0);
    }
  });
}
TR_KERNEL(rms_norm)

// tensors: x, residual, weight, out; ints: zero_centered; floats: eps
static void add_rms_norm(const Args& args, Team& team) {
  const Tensor &x = args.tensor(0), &residual = args.tensor(1), &weight = args.tensor(2), &out = args.tensor(3);
  const int64_t d = weight.size[0];
  for_float(x.dtype, [&](auto type) {
    using T = decltype(type);
    const auto [first, last] = team.share(x.size[0]);
    for (int64_t row = first; row < last; ++row) {
      add_row(x.row<T>(row), residual.row<T>(row), d);
      norm_row(residual.row<T>(row), weight.as<T>(), out.as<T>() + row * d, d, args.real(0), args.integer(0) != 0);
    }
  });
}
TR_KERNEL(add_rms_norm)

}  // namespace tilerank::TR_RUNG
#endif
