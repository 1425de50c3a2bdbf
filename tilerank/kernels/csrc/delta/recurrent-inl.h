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

// N vectors of columns of a state, before and after the token; both may be the same memory. ahead: the same columns of
// the state that comes next. out: null if the output is not needed.
template <int N, class T, class Lanes>
static inline void step_columns(const float* before, float* after, const float* ahead, int64_t dk, int64_t dv,
                                const UnitRows& rows, Vec decay, Vec beta, const T* v, T* out, Lanes lanes) {
  Vec sums[N], update[N];
  for (int n = 0; n < N; ++n) sums[n] = zero();
  for (int64_t i = 0; i < dk; ++i) {
    const Vec k = set(rows.k[i]);
    for (int n = 0; n < N; ++n) sums[n] = fma(k, lanes.load(before + i * dv + n * kLanes), sums[n]);
  }
  for (int n = 0; n < N; ++n) {
    update[n] = (lanes.load(v + n * kLanes) - decay * sums[n]) * beta;
    sums[n] = zero();
  }
  for (int64_t i = 0; i < dk; ++i) {
    const Vec q = set(rows.q[i]), k = set(rows.k[i]);
    for (int n = 0; n < N; ++n) {
      const int64_t at = i * dv + n * kLanes;
      _mm_prefetch(reinterpret_cast<const char*>(ahead + at), _MM_HINT_T1);
      const Vec value = fma(k, update[n], lanes.load(before + at) * decay);
      lanes.store(after + at, value);
      sums[n] = fma(q, value, sums[n]);
    }
  }
  if (!out) return;
  for (int n = 0; n < N; ++n) lanes.store(out + n * kLanes, sums[n]);
}

// Columns `range` of a state, which are independent of all others.
template <class T>
static void step_state(const float* before, float* after, const float* ahead, int64_t dk, int64_t dv, Range range,
                       const UnitRows& rows, Vec decay, Vec beta, const T* v, T* out) {
  int64_t column = range.begin;
  const auto go = [&](auto n, auto lanes) {
    step_columns<n>(before + column, after + column, ahead + column, dk, dv, rows, decay, beta, v + column,
                    out ? out + column : nullptr, lanes);
    column += n * kLanes;
  };
  while (column + 8 * kLanes <= range.end) go(std::integral_constant<int, 8>{}, AllLanes{});
  while (column + 2 * kLanes <= range.end) go(std::integral_constant<int, 2>{}, AllLanes{});
  while (column + kLanes <= range.end) go(std::integral_constant<int, 1>{}, AllLanes{});
  if (column < range.end) go(std::integral_constant<int, 1>{}, FirstLanes{range.end - column});
}

// The log-decay and the learning rate of a token and a value head.
struct StepGates {
  float g, beta;
};

// The rule for sequence i, which has one row, with its drafts, and columns `range` of a value head. The state takes in
// the kept drafts of the step before and the row, and is written back before any draft of this step.
// gates_of(row) returns StepGates. ahead: the state that comes next, or null. copy: working memory [dk, dv].
template <class T, class GatesOf>
static void step_head(const DeltaProblem<T>& p, int64_t i, int64_t value_head, Range range, const GatesOf& gates_of,
                      const float* ahead, float* copy) {
  float* const state = p.matrix(i, value_head);
  const size_t columns = static_cast<size_t>(range.end - range.begin);
  const int64_t key_head = value_head / p.repeats;
  const auto step = [&](const float* before, float* after, const T* row, StepGates gates, T* out) {
    const UnitRows rows(p.q(row, key_head), p.k(row, key_head), p.dk);
    step_state(before, after, ahead ? ahead : state, p.dk, p.dv, range, rows, exp(set(gates.g)), set(gates.beta),
               p.v(row, value_head), out);
  };
  const auto step_row = [&](const float* before, float* after, int64_t row) {
    step(before, after, p.row(row), gates_of(row), p.o(row, value_head));
    p.batch.for_repeats(row, [&](int64_t copy_row) {
      std::memcpy(p.o(copy_row, value_head) + range.begin, p.o(row, value_head) + range.begin, columns * sizeof(T));
    });
  };
  if (p.batch.is_fresh(i)) {
    for (int64_t k = 0; k < p.dk; ++k) std::memset(state + k * p.dv + range.begin, 0, columns * sizeof(float));
  }
  for (int64_t j = 0; j < p.batch.kept[i]; ++j) {
    const float* const gates = p.gates_of_draft(i, j);
    step(state, state, p.draft(i, j), {gates[value_head], gates[p.value_heads + value_head]}, nullptr);
  }
  step_row(state, state, p.batch.rows(i).begin);
  const float* before = state;
  for (int64_t draft = i + 1; draft < p.batch.drafts_end(i); ++draft) {
    step_row(before, copy, p.batch.rows(draft).begin);
    before = copy;
  }
}

// Stores q, k, v and the gates of the drafts of this step in their slots, once no thread reads those of the step before
// any more. write(row, g, beta) writes the gates of all value heads.
template <class T, class Write>
static void store_drafts(const DeltaProblem<T>& p, Team& team, const Write& write) {
  int64_t drafts = 0;
  for (int64_t i = 0; i < p.batch.sequences; ++i) drafts += p.batch.is_draft(i);
  if (!drafts) return;
  team.barrier();
  const auto [first, last] = team.share(drafts);
  for (int64_t i = 0, owner = 0, number = 0; i < p.batch.sequences; ++i) {
    if (!p.batch.is_draft(i)) {
      owner = i;
      continue;
    }
    if (number >= first && number < last) {
      const int64_t row = p.batch.rows(i).begin, j = i - owner - 1;
      std::memcpy(p.draft(i, j), p.row(row), static_cast<size_t>(p.qkv.size[1]) * sizeof(T));
      float* const gates = p.gates_of_draft(i, j);
      write(row, gates, gates + p.value_heads);
    }
    ++number;
  }
}

}  // namespace tilerank::TR_RUNG
