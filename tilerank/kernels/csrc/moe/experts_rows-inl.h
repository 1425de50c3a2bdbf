// What all MoE kernels do with rows, compiled once per rung (no include guard).

namespace tilerank::TR_RUNG {

// Stores kLanes columns of silu(gate) * up with the roundings of the separate kernels: of gate, up, silu and the
// product.
template <class T>
static inline void store_gated(T* out, Vec gate, Vec up) {
  store(out, round_to<T>(silu(round_to<T>(gate))) * round_to<T>(up));
}

// out = sum over a token's choices, in order, of weight * expert_out; in fp32, rounded once.
template <class T>
static void sum_choices(const ExpertsArgs& a, Team& team) {
  constexpr int64_t kPiece = 256;  // columns of a task: several threads share a single row
  const int64_t pieces = blocks(a.hidden, kPiece), top = a.ids.size[1];
  const Range tasks = team.share(a.x.size[0] * pieces);
  for (int64_t task = tasks.begin; task < tasks.end; ++task) {
    const int64_t token = task / pieces, begin = task % pieces * kPiece, end = std::min(begin + kPiece, a.hidden);
    const float* const weights = a.weights.row<const float>(token);
    for (int64_t column = begin; column < end; column += kLanes) {
      Vec sum = zero();
      for (int64_t choice = 0; choice < top; ++choice) {
        sum = sum + set(weights[choice]) * load(a.expert_out.row<const float>(token * top + choice) + column);
      }
      store(a.out.row<T>(token) + column, sum, std::min<int64_t>(kLanes, end - column));
    }
  }
}

}  // namespace tilerank::TR_RUNG
