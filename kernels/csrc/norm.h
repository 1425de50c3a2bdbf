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

// `out` may be x itself.
template <class T>
static inline void norm_row(const T* x, const T* weight, T* out, int64_t d, float eps, bool zero_centered) {
  const Vec scale = set(1.0f / std::sqrt(sum_of_squares(x, d) / static_cast<float>(d) + eps));
  const auto normed = [&](Vec value, Vec w) {
    return zero_centered ? value * scale * (set(1.0f) + w) : round_to<T>(value * scale) * w;
  };
  int64_t i = 0;
  for (; i + kLanes <= d; i += kLanes) store(out + i, normed(load(x + i), load(weight + i)));
  if (i < d) store(out + i, normed(load(x + i, d - i), load(weight + i, d - i)), d - i);
}

template <class T>
static inline void add_row(const T* x, T* residual, int64_t d) {
  int64_t i = 0;
  for (; i + kLanes <= d; i += kLanes) store(residual + i, load(residual + i) + load(x + i));
  if (i < d) store(residual + i, load(residual + i, d - i) + load(x + i, d - i), d - i);
}

}  // namespace tilerank::TR_RUNG
