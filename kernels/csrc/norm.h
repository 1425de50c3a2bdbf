// The root-mean-square norm of one row, and the sum before it, for the rung that includes this file (no include guard).

namespace tilerank::TR_RUNG {

template <class T>
static inline float sum_of_squares(const T* x, int64_t d) {
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

// Of sums of squares of rows of d elements.
static inline Vec norm_scale(Vec squares, int64_t d, float eps) {
  return set(1.0f) / sqrt(squares / set(static_cast<float>(d)) + set(eps));
}

template <class T>
static inline Vec norm_value(Vec value, Vec scale, Vec weight, bool zero_centered) {
  return zero_centered ? value * scale * (set(1.0f) + weight) : round_to<T>(value * scale) * weight;
}

// `out` may be x itself.
template <class T>
static inline void norm_row(const T* x, const T* weight, T* out, int64_t d, float eps, bool zero_centered) {
  const Vec scale = norm_scale(set(sum_of_squares(x, d)), d, eps);
  const auto normed = [&](Vec value, Vec w) { return norm_value<T>(value, scale, w, zero_centered); };
  for_lanes(d, [&](int64_t i, auto lanes) { lanes.store(out + i, normed(lanes.load(x + i), lanes.load(weight + i))); });
}

template <class T>
static inline void add_row(const T* x, T* residual, int64_t d) {
  for_lanes(d, [&](int64_t i, auto lanes) { lanes.store(residual + i, lanes.load(residual + i) + lanes.load(x + i)); });
}

}  // namespace tilerank::TR_RUNG
