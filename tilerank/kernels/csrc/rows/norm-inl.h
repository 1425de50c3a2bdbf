// The root-mean-square norm of one row, and the sum before it, compiled once per rung (no include guard).

namespace tilerank::TR_RUNG {

// Prefetches a row of d elements.
template <class T>
static inline void fetch_row(const T* x, int64_t d) {
  for (int64_t i = 0; i < d; i += 64 / static_cast<int64_t>(sizeof(T))) {
    _mm_prefetch(reinterpret_cast<const char*>(x + i), _MM_HINT_T0);
  }
}

struct Squares {
  Two sums = {zero(), zero()};

  void add(Two x) { sums = {fma(x.a, x.a, sums.a), fma(x.b, x.b, sums.b)}; }
  float sum() const { return TR_RUNG::sum(sums.a + sums.b); }
};

template <class T>
static inline float sum_of_squares(const T* x, int64_t d) {
  Squares squares;
  for_two(d, [&](int64_t i, auto two) { squares.add(two.load(x + i)); });
  return squares.sum();
}

// Returns 1 / sqrt(mean + eps) for the sums of squares of rows of d elements.
static inline Vec norm_scale(Vec squares, int64_t d, float eps) {
  return set(1.0f) / sqrt(squares / set(static_cast<float>(d)) + set(eps));
}

// Returns the norm, plain or zero-centred (kernels/ops.py: rms_norm), before it is rounded to T.
template <class T>
static inline Two norm_values(Two values, Vec scale, Two weights, bool zero_centered) {
  const Two normed = values * scale;
  return zero_centered ? normed * (weights + Two{set(1.0f), set(1.0f)}) : round_to<T>(normed) * weights;
}

// Prefetches a row during the work on another, a little at a time: prefetches at once would wait for each other.
template <class T>
struct NextRow {
  const T* row = nullptr;  // null: none

  void fetch(int64_t i) const {
    if (row) fetch_row(row + i, 2 * kLanes);
  }
};

// out = the norm of x. squares: the sum of the squares of x. `out` may be x itself.
template <class T>
static inline void norm_row(const T* x, float squares, const T* weight, T* out, int64_t d, float eps,
                            bool zero_centered, const NextRow<T>& ahead = {}) {
  const Vec scale = norm_scale(set(squares), d, eps);
  for_two(d, [&](int64_t i, auto two) {
    ahead.fetch(i);
    two.store(out + i, norm_values<T>(two.load(x + i), scale, two.load(weight + i), zero_centered));
  });
}

// Returns the factor of a residual, `scale` or 1 without it.
template <class T>
static inline Vec residual_factor(const T* scale) {
  return set(scale ? to_float(*scale) : 1.0f);
}

// residual = (residual + x) * factor, where the sum is rounded to T. Returns the sum of the squares of the result.
template <class T>
static inline float add_row(const T* x, T* residual, int64_t d, Vec factor, const NextRow<T>& ahead = {}) {
  Squares squares;
  for_two(d, [&](int64_t i, auto two) {
    ahead.fetch(i);
    squares.add(two.store(residual + i, round_to<T>(two.load(residual + i) + two.load(x + i)) * factor));
  });
  return squares.sum();
}

// residual = (residual + the norm of x by `weight`) * factor, where the norm and the sum are rounded to T. Returns the
// sum of the squares of the result.
template <class T>
static inline float add_normed_row(const T* x, const T* weight, T* residual, int64_t d, float eps, bool zero_centered,
                                   Vec factor, const NextRow<T>& ahead = {}) {
  const Vec scale = norm_scale(set(sum_of_squares(x, d)), d, eps);
  Squares squares;
  for_two(d, [&](int64_t i, auto two) {
    ahead.fetch(i);
    const Two normed = norm_values<T>(two.load(x + i), scale, two.load(weight + i), zero_centered);
    const Two sum = two.load(residual + i) + round_to<T>(normed);
    squares.add(two.store(residual + i, round_to<T>(sum) * factor));
  });
  return squares.sum();
}

}  // namespace tilerank::TR_RUNG
