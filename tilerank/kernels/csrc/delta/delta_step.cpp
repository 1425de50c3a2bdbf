// delta_step: gating and the delta rule for one token of each sequence.
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
template <class T>
static void step_sequences(const Tensor& a, const Tensor& b, const Tensor& a_log, const Tensor& dt_bias,
                           const DeltaProblem<T>& p, Team& team) {
  const int64_t heads = p.batch.sequences * p.value_heads;
  if (!heads) return;
  // Whole states are read fastest; few of them are split so that all threads take part.
  const int64_t most = (p.dv + 2 * kLanes - 1) / (2 * kLanes);
  const int64_t pieces = std::clamp<int64_t>(team.count / heads, 1, most);
  const int64_t width = (most + pieces - 1) / pieces * 2 * kLanes;
  const auto state_of = [&](int64_t task) -> const float* {
    const int64_t i = task / pieces / p.value_heads;
    return p.batch.is_padding(i) ? nullptr : p.matrix(i, task / pieces % p.value_heads);
  };
  const auto [first, last] = team.share(heads * pieces);
  for (int64_t task = first; task < last; ++task) {
    const int64_t i = task / pieces / p.value_heads, head = task / pieces % p.value_heads, piece = task % pieces;
    if (p.batch.is_padding(i)) continue;
    const Range range = {piece * width, std::min((piece + 1) * width, p.dv)};
    if (range.begin >= range.end) continue;
    const Gates gate = gates(a.row<T>(i), b.row<T>(i), a_log, dt_bias, head, FirstLanes{1});
    alignas(64) float g[kLanes], beta[kLanes];
    store(g, gate.g);
    store(beta, gate.beta);
    const UnitRows rows(p.q(i, head / p.repeats), p.k(i, head / p.repeats), p.dk);
    step_head(p, i, head, range, rows, set(g[0]), set(beta[0]), task + 1 < last ? state_of(task + 1) : nullptr);
  }
}

TR_ENTRY(delta_step, Team& team, const Tensor& qkv, const Tensor& a, const Tensor& b, const Tensor& a_log,
         const Tensor& dt_bias, const Tensor& state, const Tensor& slots, const Tensor& seq_lens, int64_t key_heads,
         const Tensor& out) {
  const DeltaBatch batch = {slots.as<int32_t>(), nullptr, seq_lens.as<int32_t>(), slots.size[0]};
  batch.check("delta_step", state.size[0], qkv.size[0]);
  for_float(qkv.dtype, [&](auto type) {
    const DeltaProblem<decltype(type)> problem(qkv, state, out, key_heads, batch);
    step_sequences(a, b, a_log, dt_bias, problem, team);
  });
}

}  // namespace tilerank::TR_RUNG
#endif
