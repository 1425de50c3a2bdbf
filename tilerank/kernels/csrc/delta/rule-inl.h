// The delta rule over a mixture of sequences, for the rung that includes this file (no include guard).

namespace tilerank::TR_RUNG {

// The columns of the states of a key head are divided into units: panels of the matrices of its value heads.
static inline int64_t panels_of(int64_t dv) { return (dv + kPanel - 1) / kPanel; }

// A part of the work of a sequence and a key head: some of its units.
struct RuleTask {
  int64_t sequence, key_head;
  Range units;
};

// Calls f for this thread's tasks. Every thread gets neighbouring tasks of about equal cost.
template <class T, class F>
static void for_tasks(const DeltaProblem<T>& p, const Team& team, const F& f) {
  constexpr int64_t kStateRows = 8;  // reading and writing a state takes about as long as so many rows
  const int64_t units = p.repeats * panels_of(p.dv);
  const auto cost_of = [&](int64_t i) {  // of a key head
    return p.batch.has_states(i) ? (kStateRows + p.batch.row_count(i)) * units : 0;
  };
  int64_t all = 0;
  for (int64_t i = 0; i < p.batch.sequences; ++i) all += cost_of(i) * p.key_heads;
  if (!all) return;
  const auto pieces_of = [&](int64_t i) {  // no task should take longer than a thread's share of the work
    return std::clamp<int64_t>((cost_of(i) * team.count + all - 1) / all, 1, units);
  };
  int64_t total = 0;
  const auto task_cost = [&](int64_t i) { return std::max<int64_t>(cost_of(i) / pieces_of(i), 1); };
  for (int64_t i = 0; i < p.batch.sequences; ++i) {
    if (cost_of(i)) total += task_cost(i) * pieces_of(i) * p.key_heads;
  }
  // A task belongs to the thread whose share of the total cost has its middle; all numbers are doubled.
  const int64_t share_begin = 2 * total * team.index / team.count,
                share_end = 2 * total * (team.index + 1) / team.count;
  int64_t preceding = 0;
  for (int64_t i = 0; i < p.batch.sequences; ++i) {
    if (!cost_of(i)) continue;
    const int64_t pieces = pieces_of(i), cost = task_cost(i), tasks = pieces * p.key_heads;
    const auto first_after = [&](int64_t bound) {
      return std::clamp<int64_t>((bound - 2 * preceding - cost + 2 * cost - 1) / (2 * cost), 0, tasks);
    };
    for (int64_t task = first_after(share_begin); task < first_after(share_end); ++task) {
      const int64_t piece = task % pieces;
      f(RuleTask{i, task / pieces, {units * piece / pieces, units * (piece + 1) / pieces}});
    }
    preceding += cost * tasks;
  }
}

template <class T, class Panel>
class Rule {
 public:
  Rule(const Tensor& g, const Tensor& beta, const DeltaProblem<T>& problem, Team& team)
      : p_(problem),
        g_(g),
        beta_(beta),
        panels_(panels_of(problem.dv)),
        width_((problem.dk + Panel::kUnit - 1) / Panel::kUnit * Panel::kUnit),
        memory_(static_cast<float*>(team.scratch(sizeof(float) * static_cast<size_t>(floats())))),
        keys_(memory_, p_.dk, Panel::kUnit),
        decays_(memory_ + ChunkKeys::floats(width_), width_),
        panel_(memory_ + ChunkKeys::floats(width_) + ChunkDecays::floats(width_), keys_, decays_),
        states_(memory_ + ChunkKeys::floats(width_) + ChunkDecays::floats(width_) + Panel::floats(width_)) {}

  void run(const RuleTask& task) {
    if (p_.batch.row_count(task.sequence) == 1) {
      run_row(task);
    } else {
      run_chunks(task);
    }
  }

 private:
  int64_t floats() const {
    return ChunkKeys::floats(width_) + ChunkDecays::floats(width_) + Panel::floats(width_) +
           p_.repeats * panels_ * width_ * kPanel;
  }
  int64_t head_of(const RuleTask& task, int64_t unit) const { return task.key_head * p_.repeats + unit / panels_; }
  int64_t column_of(int64_t unit) const { return unit % panels_ * kPanel; }
  float* panel_state(const RuleTask& task, int64_t unit) const {
    return states_ + (unit - task.units.begin) * width_ * kPanel;
  }

  void run_row(const RuleTask& task) {
    for (int64_t unit = task.units.begin, end; unit < task.units.end; unit = end) {
      end = std::min(unit / panels_ * panels_ + panels_, task.units.end);
      const int64_t head = head_of(task, unit);
      const Range columns = {column_of(unit), std::min(column_of(end - 1) + kPanel, p_.dv)};
      const float* const ahead = end < task.units.end ? p_.matrix(task.sequence, head + 1) : nullptr;
      const auto gates_of = [&](int64_t row) {
        return StepGates{g_.row<float>(row)[head], beta_.row<float>(row)[head]};
      };
      step_head(p_, task.sequence, head, columns, gates_of, ahead, states_);
    }
  }

  void run_chunks(const RuleTask& task) {
    for (int64_t unit = task.units.begin; unit < task.units.end; ++unit) load_state(task, unit);
    const auto [begin, end] = p_.batch.rows(task.sequence);
    for (int64_t first = begin; first < end; first += kChunk) {
      keys_.read(p_, first, std::min(kChunk, end - first), task.key_head);
      panel_.begin_keys();
      for (int64_t unit = task.units.begin; unit < task.units.end; ++unit) {
        const int64_t head = head_of(task, unit), column = column_of(unit);
        if (unit == task.units.begin || column == 0) {
          decays_.read(keys_, g_, beta_, first, head);
          panel_.begin_decays();
        }
        panel_.run(
            panel_state(task, unit), p_.dv - column, [&](int64_t i) { return p_.v(first + i, head) + column; },
            [&](int64_t i) { return p_.o(first + i, head) + column; });
      }
    }
    for (int64_t unit = task.units.begin; unit < task.units.end; ++unit) store_state(task, unit);
  }

  void load_state(const RuleTask& task, int64_t unit) {
    const int64_t column = column_of(unit), columns = p_.dv - column;
    float* const to = panel_state(task, unit);
    std::fill_n(to, width_ * kPanel, 0.0f);
    if (p_.batch.is_fresh(task.sequence)) return;
    const float* const from = p_.matrix(task.sequence, head_of(task, unit)) + column;
    for (int64_t d = 0; d < p_.dk; ++d) {
      for (int n = 0; n < kBlockVecs; ++n) {
        store(to + d * kPanel + n * kLanes, load_columns(from + d * p_.dv + n * kLanes, columns - n * kLanes));
      }
    }
  }

  void store_state(const RuleTask& task, int64_t unit) {
    const int64_t column = column_of(unit), columns = p_.dv - column;
    const float* const from = panel_state(task, unit);
    float* const to = p_.matrix(task.sequence, head_of(task, unit)) + column;
    for (int64_t d = 0; d < p_.dk; ++d) {
      for (int n = 0; n < kBlockVecs; ++n) {
        store_columns(to + d * p_.dv + n * kLanes, load(from + d * kPanel + n * kLanes), columns - n * kLanes);
      }
    }
  }

  const DeltaProblem<T>& p_;
  const Tensor &g_, &beta_;
  const int64_t panels_, width_;
  float* const memory_;
  ChunkKeys keys_;
  ChunkDecays decays_;
  Panel panel_;
  float* const states_;  // [units of a task, width_, kPanel]
};

// fp32 stays with vectors, whose products are exact to fp32.
#ifdef TR_AMX
template <class T>
using RulePanel = std::conditional_t<std::is_same_v<T, bf16>, TilePanel, VectorPanel>;
#else
template <class T>
using RulePanel = VectorPanel;
#endif

TR_ENTRY(delta_rule, Team& team, const Tensor& qkv, const Tensor& g, const Tensor& beta, const Tensor& states_state,
         const Tensor& states_drafts, const Tensor& states_draft_gates, const Tensor& slots, const Tensor& kept,
         const Tensor& query_starts, const Tensor& seq_lens, int64_t key_heads, const Tensor& out) {
  const DeltaBatch batch = {slots.as<int32_t>(), kept.as<int32_t>(), query_starts.as<int32_t>(), seq_lens.as<int32_t>(),
                            slots.size[0]};
  batch.check("delta_rule", states_state.size[0], qkv.size[0], states_drafts.size[1]);
  for_float(qkv.dtype, [&](auto type) {
    using T = decltype(type);
    const DeltaProblem<T> problem(qkv, states_state, states_drafts, states_draft_gates, out, key_heads, batch);
    Rule<T, RulePanel<T>> rule(g, beta, problem, team);
    for_tasks(problem, team, [&](const RuleTask& task) { rule.run(task); });
    store_drafts(problem, team, [&](int64_t row, float* g_of_draft, float* beta_of_draft) {
      std::copy_n(g.row<float>(row), problem.value_heads, g_of_draft);
      std::copy_n(beta.row<float>(row), problem.value_heads, beta_of_draft);
    });
  });
}

}  // namespace tilerank::TR_RUNG
