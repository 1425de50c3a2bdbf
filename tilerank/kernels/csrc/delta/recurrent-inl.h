// The delta rule for one token, for the rung that includes this file (no include guard).
//
// A state is read from memory once: the first pass over it, which computes S^T k, brings it into the caches; the second
// one writes exp(g) S + k u^T and computes the output while it fetches the state that comes next.

namespace tilerank::TR_RUNG {

// Writes x * scale / sqrt(sum x^2 + 1e-6).
template <class T>
static inline void unit_row(const T* x, int64_t n, float scale, float* to) {
  Vec squares = zero();
  for_lanes(n, [&](int64_t i, auto lanes) {
    const Vec values = lanes.load(x + i);
    squares = fma(values, values, squares);
  });
  const Vec factor = set(scale) / sqrt(set(sum(squares) + 1e-6f));
  for_lanes(n, [&](int64_t i, auto lanes) { lanes.store(to + i, lanes.load(x + i) * factor); });
}

// The query and key of a head, of length 1 / sqrt(dk) and 1.
struct UnitRows {
  alignas(64) float q[kMaxHeadDim], k[kMaxHeadDim];

  template <class T>
  UnitRows(const T* q_row, const T* k_row, int64_t dk) {
    unit_row(q_row, dk, 1.0f / std::sqrt(static_cast<float>(dk)), q);
    unit_row(k_row, dk, 1.0f, k);
  }
};

// N vectors of columns of a state. ahead: the same columns of the state that comes next.
template <int N, class T, class Lanes>
static inline void step_columns(float* state, const float* ahead, int64_t dk, int64_t dv, const UnitRows& rows,
                                Vec decay, Vec beta, const T* v, T* out, Lanes lanes) {
  Vec sums[N], update[N];
  for (int n = 0; n < N; ++n) sums[n] = zero();
  for (int64_t i = 0; i < dk; ++i) {
    const Vec k = set(rows.k[i]);
    for (int n = 0; n < N; ++n) sums[n] = fma(k, lanes.load(state + i * dv + n * kLanes), sums[n]);
  }
  for (int n = 0; n < N; ++n) {
    update[n] = (lanes.load(v + n * kLanes) - decay * sums[n]) * beta;
    sums[n] = zero();
  }
  for (int64_t i = 0; i < dk; ++i) {
    const Vec q = set(rows.q[i]), k = set(rows.k[i]);
    for (int n = 0; n < N; ++n) {
      float* const at = state + i * dv + n * kLanes;
      _mm_prefetch(reinterpret_cast<const char*>(ahead + i * dv + n * kLanes), _MM_HINT_T1);
      const Vec value = fma(k, update[n], lanes.load(at) * decay);
      lanes.store(at, value);
      sums[n] = fma(q, value, sums[n]);
    }
  }
  for (int n = 0; n < N; ++n) lanes.store(out + n * kLanes, sums[n]);
}

// Columns `range` of a state, which are independent of all others.
template <class T>
static void step_state(float* state, const float* ahead, int64_t dk, int64_t dv, Range range, const UnitRows& rows,
                       Vec decay, Vec beta, const T* v, T* out) {
  int64_t column = range.begin;
  const auto go = [&](auto n, auto lanes) {
    step_columns<n>(state + column, ahead + column, dk, dv, rows, decay, beta, v + column, out + column, lanes);
    column += n * kLanes;
  };
  while (column + 8 * kLanes <= range.end) go(std::integral_constant<int, 8>{}, AllLanes{});
  while (column + 2 * kLanes <= range.end) go(std::integral_constant<int, 2>{}, AllLanes{});
  while (column + kLanes <= range.end) go(std::integral_constant<int, 1>{}, AllLanes{});
  if (column < range.end) go(std::integral_constant<int, 1>{}, FirstLanes{range.end - column});
}

// The rule for sequence i, which has one row, and columns `range` of a value head.
template <class T>
static void step_head(const DeltaProblem<T>& p, int64_t i, int64_t value_head, Range range, const UnitRows& rows, Vec g,
                      Vec beta, const float* ahead) {
  const int64_t row = p.batch.rows(i).begin;
  float* const state = p.matrix(i, value_head);
  const size_t bytes = static_cast<size_t>(range.end - range.begin) * sizeof(float);
  if (p.batch.is_fresh(i)) {
    for (int64_t k = 0; k < p.dk; ++k) std::memset(state + k * p.dv + range.begin, 0, bytes);
  }
  step_state(state, ahead ? ahead : state, p.dk, p.dv, range, rows, exp(g), beta, p.v(row, value_head),
             p.o(row, value_head));
  p.batch.for_repeats(row, [&](int64_t copy) {
    std::memcpy(p.o(copy, value_head) + range.begin, p.o(row, value_head) + range.begin,
                static_cast<size_t>(range.end - range.begin) * sizeof(T));
  });
}

}  // namespace tilerank::TR_RUNG
