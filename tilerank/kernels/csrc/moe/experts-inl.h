// The driver of the MoE kernels of all formats, compiled once per rung (no include guard):
// out = sum over a token's experts of weight * down(silu(gate(x)) * up(x)).

namespace tilerank::TR_RUNG {

// silu(gate) * up. Gate, up and silu are rounded to T, as the separate kernels round them; to fp32 means not at all.
template <class T>
static inline Vec32 gated(const Vec32& gate, const Vec32& up) {
  Vec32 values;
  for (int v = 0; v < kBlockN / kLanes; ++v) {
    values[v] = round_to<T>(silu(round_to<T>(gate[v]))) * round_to<T>(up[v]);
  }
  return values;
}

// The destinations of the projections: write() receives a row of the batch and its values with a block, or with a block
// of gate and one of up. from(first) is the destination of the rows from `first` on.
//
// Gate and up become rows of T.
template <class T, class Rounds>
struct ToMiddleRows {
  const Tensor& middle;
  int64_t first;

  ToMiddleRows from(int64_t row) const { return {middle, first + row}; }
  void write(int64_t row, int64_t block, const Vec32& gate, const Vec32& up) const {
    store(middle.row<T>(first + row) + block * kBlockN, gated<Rounds>(gate, up));
  }
};

// The outputs of the (token, choice) pairs of the rows.
template <bool kStreams = false>
struct ToChoices {
  const Tensor& expert_out;
  const int32_t* pairs;

  ToChoices from(int64_t row) const { return {expert_out, pairs + row}; }
  void write(int64_t row, int64_t block, const Vec32& values, const Vec32&) const {
    float* const out = expert_out.row<float>(pairs[row]) + block * kBlockN;
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
    product_.template multiply<2>(a_.gate_up.from(batch.expert * a_.width_blocks * 2), a_.hidden, batch.rows, own, row,
                                  ToMiddleRows<Middle, typename Product::Rounds>{a_.middle, batch.first});
  }

  void down(const ExpertBatch& batch, Range own) const {
    const auto row = [&](int64_t i) { return a_.middle.template row<const Middle>(batch.first + i); };
    product_.template multiply<1>(a_.down.from(batch.expert * a_.hidden_blocks), a_.width, batch.rows, own, row,
                                  ToChoices<>{a_.expert_out, batches_.order + batch.first});
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
#define TR_MOE(format, Weight, ...)                                                                                 \
  TR_ENTRY(moe_##format, Team& team, const Tensor& x, const Weight& gate_up, const Weight& down, const Tensor& ids, \
           const Tensor& weights, int64_t experts, int64_t width, const Tensor& out, const Tensor& middle,          \
           const Tensor& expert_out, const Tensor& queues) {                                                        \
    if (x.size[0] == 0) return;                                                                                     \
    moe<__VA_ARGS__>({x, gate_up, down, ids, weights, experts, width, out, middle, expert_out, queues}, team);      \
  }

}  // namespace tilerank::TR_RUNG
