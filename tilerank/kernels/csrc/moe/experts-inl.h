// The driver of the MoE kernels of all formats, compiled once per rung (no include guard):
// out = sum over a token's experts of weight * (down(activation(gate(x), up(x))) + bias).
#include "simd/activations-inl.h"

namespace tilerank::TR_RUNG {

// Numbered as in moe.py.
enum class Gating : int64_t { silu, swiglu_clamped, gelu_tanh };

// (u + 1) g sigmoid(1.702 g) with g = min(gate, 7) and u = up clamped to [-7, 7], of gpt-oss. NaN stays NaN.
static inline Vec swiglu_clamped(Vec gate, Vec up) {
  constexpr float kAlpha = 1.702f, kLimit = 7.0f;
  const Vec g = min(set(kLimit), gate), u = max(set(-kLimit), min(set(kLimit), up));
  return silu(set(kAlpha) * g) * set(1 / kAlpha) * (u + set(1.0f));
}

// The activation of gate times up. Those of silu and gelu_tanh are rounded to T, as the separate kernels round them; to
// fp32 means not at all.
template <class T>
static inline Vec gated(Gating gating, Vec gate, Vec up) {
  if (gating == Gating::swiglu_clamped) return swiglu_clamped(gate, up);
  return round_to<T>(gating == Gating::silu ? silu(gate) : gelu_tanh(gate)) * up;
}

// What an expert makes of the sums of gate and up.
struct Gate {
  Gating gating;
  const float* bias;  // [blocks][gate, up][32], or null

  // Gate and up are rounded to T before `gated`.
  template <class T>
  Vec32 apply(int64_t block, const Vec32& gates, const Vec32& ups) const {
    Vec32 values;
    for (int v = 0; v < kBlockN / kLanes; ++v) {
      Vec gate = gates[v], up = ups[v];
      if (bias) {
        const float* const at = bias + block * 2 * kBlockN + v * kLanes;
        gate = gate + load(at);
        up = up + load(at + kBlockN);
      }
      values[v] = gated<T>(gating, round_to<T>(gate), round_to<T>(up));
    }
    return values;
  }
};

// The gate of an expert.
template <class Weight>
static inline Gate gate_of(const ExpertsArgs<Weight>& a, int64_t expert) {
  const Tensor& bias = a.gate_up_bias;
  return {static_cast<Gating>(a.activation), bias ? bias.row<const float>(expert) : nullptr};
}

// The destinations of the projections: write() receives a row of the batch and its values with a block, or with a block
// of gate and one of up. from(first) is the destination of the rows from `first` on.
//
// Gate and up become rows of T.
template <class T, class Rounds>
struct ToMiddleRows {
  const Tensor& middle;
  int64_t first;
  Gate gate;

  ToMiddleRows from(int64_t row) const { return {middle, first + row, gate}; }
  void write(int64_t row, int64_t block, const Vec32& gates, const Vec32& ups) const {
    store(middle.row<T>(first + row) + block * kBlockN, gate.apply<Rounds>(block, gates, ups));
  }
};

// The outputs of the (token, choice) pairs of the rows.
template <bool kStreams = false>
struct ToChoices {
  const Tensor& expert_out;
  const int32_t* pairs;
  const float* bias;  // [blocks][32] of the expert, or null

  template <class Weight>
  ToChoices(const ExpertsArgs<Weight>& a, const int32_t* pairs, int64_t expert)
      : expert_out(a.expert_out),
        pairs(pairs),
        bias(a.down_bias ? a.down_bias.template row<const float>(expert) : nullptr) {}

  ToChoices from(int64_t row) const {
    ToChoices to = *this;
    to.pairs += row;
    return to;
  }
  void write(int64_t row, int64_t block, Vec32 values, const Vec32&) const {
    float* const out = expert_out.row<float>(pairs[row]) + block * kBlockN;
    for (int v = 0; bias && v < kBlockN / kLanes; ++v)
      values[v] = values[v] + load(bias + block * kBlockN + v * kLanes);
    kStreams ? stream(out, values) : store(out, values);
  }
};

// The projections of experts whose rows are kept as rows of Product::Middle between the two. A Product is made from
// ExpertsArgs and bytes(args) bytes of memory, and multiplies `rows` rows with results of an expert:
//
//   multiply<parts>(weight of the expert, k, rows, results, row, destination)
//
// row(i) points to the k inputs of row i.
template <class Product>
class RowExperts {
 public:
  using Arguments = ExpertsArgs<typename Product::Weight>;
  using Input = typename Product::Input;
  static constexpr int64_t kMemoryBoundRows = Product::kMemoryBoundRows;

  static size_t bytes(const Arguments& a) { return Product::bytes(a); }
  RowExperts(const Arguments& args, const ExpertBatches& batches, char* memory)
      : a_(args), batches_(batches), product_(args, memory) {}

  void gate_up(const ExpertBatch& batch, Range own) const {
    const auto row = [&](int64_t i) {
      return a_.x.template row<const Input>(batches_.order[batch.first + i] / batches_.top);
    };
    product_.template multiply<2>(
        a_.gate_up.from(batch.expert * a_.width_blocks * 2), a_.hidden, batch.rows, own, row,
        ToMiddleRows<Middle, typename Product::Rounds>{a_.middle, batch.first, gate_of(a_, batch.expert)});
  }

  void down(const ExpertBatch& batch, Range own) const {
    const auto row = [&](int64_t i) { return a_.middle.template row<const Middle>(batch.first + i); };
    product_.template multiply<1>(a_.down.from(batch.expert * a_.hidden_blocks), a_.width, batch.rows, own, row,
                                  ToChoices<>(a_, batches_.order + batch.first, batch.expert));
  }

 private:
  using Middle = typename Product::Middle;

  const Arguments& a_;
  const ExpertBatches& batches_;
  const Product product_;
};

// out = sum over a token's choices, in order, of weight * expert_out; in fp32, rounded once.
template <class T, class Weight>
static void sum_choices(const ExpertsArgs<Weight>& a, Team& team) {
  constexpr int64_t kPiece = 256;  // columns of a task: several threads share a single row
  const int64_t pieces = blocks(a.hidden, kPiece), top = a.ids.size[1];
  const Range tasks = team.share(a.x.size[0] * pieces);
  for (int64_t task = tasks.begin; task < tasks.end; ++task) {
    const int64_t token = task / pieces, begin = task % pieces * kPiece, end = std::min(begin + kPiece, a.hidden);
    const float* const weights = a.weights.template row<const float>(token);
    for (int64_t column = begin; column < end; column += kLanes) {
      Vec sum = zero();
      for (int64_t choice = 0; choice < top; ++choice) {
        sum = sum + set(weights[choice]) * load(a.expert_out.template row<const float>(token * top + choice) + column);
      }
      store(a.out.template row<T>(token) + column, sum, std::min<int64_t>(kLanes, end - column));
    }
  }
}

// Experts has the two projections of a batch, gate_up and down, the number of rows whose products take as long as
// reading the weight (kMemoryBoundRows), and the type of x and out (Input).
template <class Experts>
static void moe(const typename Experts::Arguments& a, Team& team) {
  const size_t batches_bytes = ExpertBatches::bytes(a.ids, a.experts);
  char* const memory = static_cast<char*>(team.scratch(batches_bytes + Experts::bytes(a)));
  const ExpertBatches batches(a.ids, a.experts, memory);
  const ExpertQueues queues(a.queues, team);
  const Experts experts(a, batches, memory + batches_bytes);
  batches.for_work(a.width_blocks, Experts::kMemoryBoundRows, queues.gate_up, team,
                   [&](const ExpertBatch& batch, Range own) { experts.gate_up(batch, own); });
  end_streams();
  team.barrier();
  batches.for_work(a.hidden_blocks, Experts::kMemoryBoundRows, queues.down, team,
                   [&](const ExpertBatch& batch, Range own) { experts.down(batch, own); });
  end_streams();
  team.barrier();
  sum_choices<typename Experts::Input>(a, team);
}

// Registers moe_<format>, which is moe<Experts>; Experts are the arguments after the first two.
#define TR_MOE(format, Weight, ...)                                                                                    \
  TR_ENTRY(moe_##format, Team& team, const Tensor& x, const Weight& gate_up, const Weight& down, const Tensor& ids,    \
           const Tensor& weights, int64_t experts, int64_t width, const Tensor& gate_up_bias, const Tensor& down_bias, \
           int64_t activation, const Tensor& out, const Tensor& middle, const Tensor& expert_out,                      \
           const Tensor& queues) {                                                                                     \
    if (x.size[0] == 0) return;                                                                                        \
    moe<__VA_ARGS__>({x, gate_up, down, ids, weights, experts, width, gate_up_bias, down_bias, activation, out,        \
                      middle, expert_out, queues},                                                                     \
                     team);                                                                                            \
  }

}  // namespace tilerank::TR_RUNG
