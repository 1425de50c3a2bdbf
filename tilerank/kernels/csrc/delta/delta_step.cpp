// delta_step: gating and the delta rule for one token of each sequence, and for drafts of what follows it.
#ifndef TR_RUNG
#include <type_traits>

#include "delta/delta_problem.h"
#define TR_SOURCE "delta/delta_step.cpp"
#include "simd/foreach_isa.h"
#else
#include "delta/gates-inl.h"
#include "delta/recurrent-inl.h"

namespace tilerank::TR_RUNG {

// A task is the columns `piece` of a value head of a sequence.
template <class T, class GatesOf>
static void step_sequences(const GatesOf& gates_of, const DeltaProblem<T>& p, Team& team) {
  const DeltaBatch& batch = p.batch;
  int64_t heads = 0;
  for (int64_t i = batch.next(0); i < batch.sequences; i = batch.next(i + 1)) heads += p.value_heads;
  if (!heads) return;
  // Whole states are read fastest; few of them are split so that all threads take part.
  const int64_t most = (p.dv + 2 * kLanes - 1) / (2 * kLanes);
  const int64_t pieces = std::clamp<int64_t>(team.count / heads, 1, most);
  const int64_t width = (most + pieces - 1) / pieces * 2 * kLanes, tasks = p.value_heads * pieces;
  float* const copy = static_cast<float*>(team.scratch(sizeof(float) * static_cast<size_t>(p.dk * p.dv)));
  const auto [first, last] = team.share(heads * pieces);
  for (int64_t i = batch.next(0), begin = 0, after; i < batch.sequences; i = after, begin += tasks) {
    after = batch.next(i + 1);
    // The state of a task of sequence i or the one after it.
    const auto state_of = [&](int64_t task) -> const float* {
      if (task >= last) return nullptr;
      return task < begin + tasks ? p.matrix(i, (task - begin) / pieces) : p.matrix(after, 0);
    };
    for (int64_t task = std::max(first, begin); task < std::min(last, begin + tasks); ++task) {
      const int64_t head = (task - begin) / pieces, piece = (task - begin) % pieces;
      const Range range = {piece * width, std::min((piece + 1) * width, p.dv)};
      if (range.begin >= range.end) continue;
      step_head(p, i, head, range, [&](int64_t row) { return gates_of(row, head); }, state_of(task + 1), copy);
    }
  }
}

TR_ENTRY(delta_step, Team& team, const Tensor& qkv, const Tensor& a, const Tensor& b, const Tensor& a_log,
         const Tensor& dt_bias, const Tensor& states_state, const Tensor& states_drafts,
         const Tensor& states_draft_gates, const Tensor& slots, const Tensor& kept, const Tensor& seq_lens,
         int64_t key_heads, const Tensor& out) {
  const DeltaBatch batch = {slots.as<int32_t>(), kept.as<int32_t>(), nullptr, seq_lens.as<int32_t>(), slots.size[0]};
  batch.check("delta_step", states_state.size[0], qkv.size[0], states_drafts.size[1]);
  for_float(qkv.dtype, [&](auto type) {
    using T = decltype(type);
    const DeltaProblem<T> problem(qkv, states_state, states_drafts, states_draft_gates, out, key_heads, batch);
    const auto gates_of = [&](int64_t row, int64_t head) {
      const Gates found = gates(a.row<T>(row), b.row<T>(row), a_log, dt_bias, head, FirstLanes{1});
      alignas(64) float g[kLanes], beta[kLanes];
      store(g, found.g);
      store(beta, found.beta);
      return StepGates{g[0], beta[0]};
    };
    step_sequences(gates_of, problem, team);
    store_drafts(problem, team, [&](int64_t row, float* g, float* beta) {
      write_gates(a.row<T>(row), b.row<T>(row), a_log, dt_bias, problem.value_heads, g, beta);
    });
  });
}

}  // namespace tilerank::TR_RUNG
#endif
