// add, mul, scale, clamp, sum_parts, gelu, silu and tanh_gate: element by element, in fp32, rounded once where nothing
// else is said.
#ifndef TR_RUNG
#include "core/entry.h"
#include "rows/rows.h"
#define TR_SOURCE "rows/elements.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

// Calls f(row, column, n) for this thread's pieces of a tensor [..., d]. Elements are independent, so even a single row
// is split over the threads, in pieces of a few cache lines.
template <class F>
static void for_pieces(const Tensor& x, Team& team, const F& f) {
  constexpr int64_t kPiece = 256;
  const int64_t d = x.size[x.ndim - 1], pieces = (d + kPiece - 1) / kPiece;
  const auto [first, last] = team.share(row_count(x) * pieces);
  for (int64_t item = first; item < last; ++item) {
    const int64_t column = item % pieces * kPiece;
    f(item / pieces, column, std::min(kPiece, d - column));
  }
}

TR_ENTRY(add, Team& team, const Tensor& x, const Tensor& y, const Tensor& out) {
  const int64_t d = x.size[x.ndim - 1];
  for_float(x.dtype, [&](auto type) {
    using T = decltype(type);
    for_pieces(x, team, [&](int64_t row, int64_t column, int64_t n) {
      const T* const a = x.as<T>() + row_offset(x, row) + column;
      const T* const b = y.as<T>() + row_offset(y, row) + column;
      T* const to = out.as<T>() + row * d + column;
      for_two(n, [&](int64_t i, auto two) { two.store(to + i, two.load(a + i) + two.load(b + i)); });
    });
  });
}

// x *= y
TR_ENTRY(mul, Team& team, const Tensor& x, const Tensor& y) {
  for_float(x.dtype, [&](auto type) {
    using T = decltype(type);
    for_pieces(x, team, [&](int64_t row, int64_t column, int64_t n) {
      T* const to = x.as<T>() + row_offset(x, row) + column;
      const T* const by = y.as<T>() + row_offset(y, row) + column;
      for_two(n, [&](int64_t i, auto two) { two.store(to + i, two.load(to + i) * two.load(by + i)); });
    });
  });
}

// x *= factor
TR_ENTRY(scale, Team& team, const Tensor& x, float factor) {
  for_float(x.dtype, [&](auto type) {
    using T = decltype(type);
    for_pieces(x, team, [&](int64_t row, int64_t column, int64_t n) {
      T* const to = x.as<T>() + row_offset(x, row) + column;
      for_lanes(n, [&](int64_t i, auto lanes) { lanes.store(to + i, lanes.load(to + i) * set(factor)); });
    });
  });
}

// min(max(x, low), high). NaN stays NaN.
TR_ENTRY(clamp, Team& team, const Tensor& x, const Tensor& low, const Tensor& high, const Tensor& out) {
  const int64_t d = x.size[x.ndim - 1];
  for_float(x.dtype, [&](auto type) {
    using T = decltype(type);
    const Vec least = set(to_float(*low.as<T>())), most = set(to_float(*high.as<T>()));
    for_pieces(x, team, [&](int64_t row, int64_t column, int64_t n) {
      const T* const from = x.as<T>() + row_offset(x, row) + column;
      T* const to = out.as<T>() + row * d + column;
      for_lanes(n, [&](int64_t i, auto lanes) { lanes.store(to + i, min(most, max(least, lanes.load(from + i)))); });
    });
  });
}

TR_ENTRY(sum_parts, Team& team, const Tensor& parts, const Tensor& out) {
  const int64_t d = out.size[1];
  for_float(parts.dtype, [&](auto type) {
    using T = decltype(type);
    for_pieces(out, team, [&](int64_t row, int64_t column, int64_t n) {
      const T* const from = parts.as<T>() + row * parts.stride[1] + column;
      T* const to = out.as<T>() + row * d + column;
      for_lanes(n, [&](int64_t i, auto lanes) {
        Vec total = zero();
        for (int64_t part = 0; part < parts.size[0]; ++part) {
          total = total + lanes.load(from + part * parts.stride[0] + i);
        }
        lanes.store(to + i, total);
      });
    });
  });
}

// x * Phi(x) = max(x, 0) - |x| / 2 * erfc(|x| / sqrt(2)). erfc(z) = t * exp(-z^2 + p(t)), t = 1 / (1 + z / 2), with the
// polynomial p of Numerical Recipes ("erfcc"): within 1.2e-7, relatively, so that small results keep their digits.
static inline Vec gelu_erf(Vec x) {
  const Vec size = min(set(100.0f), max(x, zero() - x)), z = size * set(0.70710678118654752f);  // NaN stays NaN
  const Vec t = set(1.0f) / fma(z, set(0.5f), set(1.0f));
  Vec p = set(0.17087277f);
  p = fma(p, t, set(-0.82215223f));
  p = fma(p, t, set(1.48851587f));
  p = fma(p, t, set(-1.13520398f));
  p = fma(p, t, set(0.27886807f));
  p = fma(p, t, set(-0.18628806f));
  p = fma(p, t, set(0.09678418f));
  p = fma(p, t, set(0.37409196f));
  p = fma(p, t, set(1.00002368f));
  p = fma(p, t, set(-1.26551223f));
  const Vec erfc = t * exp(fma(zero() - z, z, p));
  return max(x, zero()) - size * set(0.5f) * erfc;
}

// x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 * x^3)
static inline Vec gelu_tanh(Vec x) {
  const Vec u = x * fma(x * x, set(0.044715f), set(1.0f));
  return x / (set(1.0f) + exp(u * set(-1.59576912160573071f)));
}

TR_ENTRY(gelu, Team& team, const Tensor& x, bool tanh, const Tensor& out) {
  const int64_t d = x.size[x.ndim - 1];
  for_float(x.dtype, [&](auto type) {
    using T = decltype(type);
    for_pieces(x, team, [&](int64_t row, int64_t column, int64_t n) {
      const T* const from = x.as<T>() + row_offset(x, row) + column;
      T* const to = out.as<T>() + row * d + column;
      if (tanh) {
        for_lanes(n, [&](int64_t i, auto lanes) { lanes.store(to + i, gelu_tanh(lanes.load(from + i))); });
      } else {
        for_lanes(n, [&](int64_t i, auto lanes) { lanes.store(to + i, gelu_erf(lanes.load(from + i))); });
      }
    });
  });
}

TR_ENTRY(silu, Team& team, const Tensor& x, const Tensor& out) {
  const int64_t d = x.size[x.ndim - 1];
  for_float(x.dtype, [&](auto type) {
    using T = decltype(type);
    for_pieces(x, team, [&](int64_t row, int64_t column, int64_t n) {
      const T* const from = x.as<T>() + row_offset(x, row) + column;
      T* const to = out.as<T>() + row * d + column;
      for_lanes(n, [&](int64_t i, auto lanes) { lanes.store(to + i, silu(lanes.load(from + i))); });
    });
  });
}

// x *= tanh(gate), which is rounded, and 0 where shown is 0. shown: or none.
TR_ENTRY(tanh_gate, Team& team, const Tensor& x, const Tensor& gate, const Tensor& shown) {
  for_float(x.dtype, [&](auto type) {
    using T = decltype(type);
    Vec factor = zero();
    for_lanes(1, [&](int64_t, auto lanes) {
      const Vec power = exp(lanes.load(gate.as<T>()) * set(2.0f));  // the other lanes hold e^0
      factor = round_to<T>(set(sum(set(1.0f) - set(2.0f) / (power + set(1.0f)))));
    });
    for_pieces(x, team, [&](int64_t row, int64_t column, int64_t n) {
      const bool hidden = shown.data != nullptr && shown.as<float>()[row * shown.stride[0]] == 0.0f;
      T* const to = x.as<T>() + row_offset(x, row) + column;
      for_lanes(n, [&](int64_t i, auto lanes) { lanes.store(to + i, hidden ? zero() : lanes.load(to + i) * factor); });
    });
  });
}

}  // namespace tilerank::TR_RUNG
#endif
