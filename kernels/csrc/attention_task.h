// What attention works on, for the rung that includes this file (after attention_batch.h; no include guard, no own
// region).
//
// A task is up to some number of rows of one sequence and KV head; a row is a query head of a query token. A row's bits
// depend on nothing but the row and its keys: chunks are counted from the first page of the sequence, the sums of a row
// always run in the same order, part by part, and what a row must not see (later tokens of its task, the rest of a
// page) enters as an exact zero.

namespace tilerank::TR_RUNG {

constexpr int64_t kMaxDim = 256;
// Tokens of a part: what is summed up over one is merged with the parts before, by the largest score of each
// (flash-decoding, with its log sum exp as maximum and sum). Threads may share a task by these parts.
constexpr int64_t kPart = 2048;

struct Task {
  int64_t sequence;
  int64_t first_page;            // of the table: the one with the first token
  int64_t hidden, length;        // tokens of these pages: the first ones, which nobody sees, and all
  int64_t query, queries;        // the sequence's rows of q
  int64_t kv_head, head, heads;  // first query head and their number
  int64_t row, rows;             // this task's part of the queries * heads rows
  bool causal;                   // else every row sees all of the length

  bool same(const Task& other) const {
    return sequence == other.sequence && kv_head == other.kv_head && row == other.row;
  }
  int64_t token(int64_t r) const { return (row + r) / heads; }
  // Tokens up to which row r sees, counted like the length. Does not fall with r.
  int64_t visible(int64_t r) const { return causal ? length - queries + token(r) + 1 : length; }
  int64_t seen() const { return visible(rows - 1); }
  int64_t parts() const { return std::max<int64_t>((seen() + kPart - 1) / kPart, 1); }
  template <class T>
  T* element(const Tensor& t, int64_t r) const {
    return t.row<T>(query + token(r)) + (head + (row + r) % heads) * t.stride[1];
  }
};

struct Problem {
  const Tensor &q, &k_pages, &v_pages, &block_tables, &out, &lse, &scales;
  float scale;

  bool quantized() const { return k_pages.dtype == DType::i8; }
  int64_t dims() const { return q.size[2]; }
  int64_t padded_dims() const { return (q.size[2] + 15) / 16 * 16; }
  int64_t key_dims() const { return k_pages.size[3] / 16; }

  // Index of a page of a sequence in the cache, checked.
  int64_t page(int64_t sequence, int64_t index) const {
    const int32_t page = block_tables.row<int32_t>(sequence)[index];
    if (page < 0 || page >= k_pages.size[0]) {
      throw Error("attention: block_tables: expected pages in [0, " + std::to_string(k_pages.size[0]) +
                  ") for sequence " + std::to_string(sequence) + ", found " + std::to_string(page));
    }
    return page;
  }
  template <class T>
  const T* keys(int64_t page, int64_t head) const {
    return k_pages.row<T>(page) + head * k_pages.stride[1];
  }
  template <class T>
  const T* values(int64_t page, int64_t head) const {
    return v_pages.row<T>(page) + head * v_pages.stride[1];
  }
  // What the codes of each token of a page are to be multiplied with.
  const float* key_scales(int64_t page, int64_t head) const {
    return scales.row<float>(page) + head * scales.stride[1];
  }
  const float* value_scales(int64_t page, int64_t head) const { return key_scales(page, head) + kBlock; }
  void fetch_scales(int64_t page, int64_t head) const {
    const float* const scales = key_scales(page, head);
    for (int64_t i = 0; i < 2 * kBlock; i += 16) _mm_prefetch(reinterpret_cast<const char*>(scales + i), _MM_HINT_T0);
  }

  // What a thread probably reads after `heads` KV heads, of which the task's is the first, to ask for it ahead.
  template <class T>
  const T* keys_after(const Task& task, int64_t heads) const {
    const int64_t head = task.kv_head + heads;
    const bool same = head < k_pages.size[1];
    const int64_t sequence = task.sequence + (same ? 0 : 1);
    if (sequence == block_tables.size[0]) return keys<T>(0, 0);
    const int64_t page = block_tables.row<int32_t>(sequence)[same ? task.first_page : 0];
    return keys<T>(std::clamp<int64_t>(page, 0, k_pages.size[0] - 1), same ? head : 0);
  }
};

// The rows of a task in their order, one after the other: without the divisions that a row's number takes. By heads:
// of tokens that are whole, those of a head before those of the next one.
class RowWalk {
 public:
  explicit RowWalk(const Task& task, bool by_heads = false)
      : task_(&task), token_(task.token(0)), head_(task.row % task.heads), by_heads_(by_heads) {}

  template <class T>
  T* element(const Tensor& t) const {
    return t.row<T>(task_->query + token_) + (task_->head + head_) * t.stride[1];
  }
  int64_t visible() const { return task_->causal ? task_->length - task_->queries + token_ + 1 : task_->length; }
  void next() {
    if (by_heads_) {
      if (++token_ < (task_->row + task_->rows) / task_->heads) return;
      token_ = task_->token(0);
      ++head_;
      return;
    }
    if (++head_ < task_->heads) return;
    head_ = 0;
    ++token_;
  }

 private:
  const Task* task_;
  int64_t token_, head_;
  bool by_heads_;
};

// f(task) for every task of at most `max_rows` rows, in the order of the batch.
template <class F>
static void for_tasks(const Args& args, int64_t max_rows, F&& f) {
  const Tensor &seq_lens = args.tensor(4), &query_starts = args.tensor(5), &kv_map = args.tensor(6),
               &kv_starts = args.tensor(9);
  for (int64_t sequence = 0; sequence < seq_lens.size[0]; ++sequence) {
    const int64_t length = seq_lens.as<int32_t>()[sequence];
    const int64_t first = kv_starts && length > 0 ? kv_starts.as<int32_t>()[sequence] : 0;
    const int32_t* start = query_starts.as<int32_t>() + sequence;
    for (int64_t kv_head = 0; kv_head < kv_map.size[0]; ++kv_head) {
      const int32_t* heads = kv_map.row<int32_t>(kv_head);
      Task task{sequence,
                first / kBlock,
                first % kBlock,
                first % kBlock + length,
                start[0],
                start[1] - start[0],
                kv_head,
                heads[0],
                heads[1],
                0,
                0,
                args.integer(0) != 0};
      const int64_t rows = task.queries * task.heads;
      for (; task.row < rows; task.row += max_rows) {
        task.rows = std::min(max_rows, rows - task.row);
        f(task);
      }
    }
  }
}

// A row that sees nothing.
template <class T>
static void clear_rows(const Problem& problem, const Task& task) {
  for (int64_t r = 0; r < task.rows; ++r) {
    std::memset(static_cast<void*>(task.element<T>(problem.out, r)), 0,
                sizeof(T) * static_cast<size_t>(problem.dims()));
    if (problem.lse) *task.element<float>(problem.lse, r) = -std::numeric_limits<float>::infinity();
  }
}

// Parts begin to end of a task; or all of as many tasks as there are heads, of one row of q: those of neighbouring KV
// heads whose query heads are neighbours as well.
struct Span {
  Task task;  // the first one
  int64_t begin, end, heads = 1;

  bool whole() const { return begin == 0 && end == task.parts(); }
  bool is_followed_by(const Span& next) const {
    return task.queries == 1 && whole() && next.whole() && task.sequence == next.task.sequence &&
           task.kv_head + heads == next.task.kv_head && task.head + heads * task.heads == next.task.head &&
           task.rows == next.task.rows && task.rows == task.heads;
  }
  // The rows of all tasks, as if they were of one.
  Task all() const {
    Task all = task;
    all.heads *= heads;
    all.rows *= heads;
    return all;
  }
};

// Sums of a task's rows over a part: weighted values, weights lane by lane, and what the scores were reduced by.
struct Sums {
  float *values, *weights, *max;
};

// Memory for the sums of parts, one after the other. dims: what there is room for in a row.
static inline int64_t floats_of_part(int64_t rows, int64_t dims) { return (rows + 31) / 32 * 32 * (dims + 16 + 16); }
static inline Sums sums_of_part(float* parts, int64_t number, int64_t rows, int64_t dims) {
  float* const at = parts + number * floats_of_part(rows, dims);
  rows = (rows + 31) / 32 * 32;
  return {at, at + rows * dims, at + rows * (dims + 16)};
}

// f(owner, span) for all spans of all threads, in the order of the batch; weight(task): the cost of a token of it.
template <class Weight, class F>
static void for_spans(const Args& args, int64_t max_rows, Weight&& weight, int threads, F&& f) {
  Deal deal{0, threads};
  const auto cost = [&](const Task& task) { return weight(task) * (task.seen() + 1); };
  for_tasks(args, max_rows, [&](const Task& task) { deal.total += cost(task); });
  for_tasks(args, max_rows, [&](const Task& task) {
    const int64_t parts = task.parts(), of_part = weight(task) * kPart, all = cost(task);
    const auto owner = [&](int64_t part) {
      return deal.owner(part * of_part, std::min(of_part, all - part * of_part));
    };
    for (int64_t begin = 0, end; begin < parts; begin = end) {
      const int thread = owner(begin);
      end = owner(parts - 1) == thread ? parts : begin + 1;
      while (end < parts && owner(end) == thread) ++end;
      f(thread, Span{task, begin, end});
    }
    deal.dealt += all;
  });
}

// Runs the spans of this thread, in their order, with a `Runner` each, or one for all that Runner::joins: run(), and
// for a task that several threads share merge(part, sums) of all parts that the first of them did not have, in their
// order, and store_rows().
template <class Runner, class Weight>
static void run_spans(const Args& args, const Problem& problem, int64_t max_rows, Weight&& weight, Team& team) {
  using Scratch = typename Runner::Scratch;
  struct Rest {
    int owner;
    int64_t begin, end;
  };
  std::optional<Span> last;  // or first of those that are joined
  Scratch* sums_of_last = nullptr;
  std::vector<Rest> rests;  // of the last one's task, by other threads
  bool shared = false;
  const auto scratch = [&](int64_t parts, int64_t rows) -> Scratch& {
    const int64_t floats = parts * floats_of_part(rows, problem.padded_dims());
    return *static_cast<Scratch*>(team.scratch(sizeof(Scratch) + sizeof(float) * static_cast<size_t>(floats)));
  };
  const auto parts_in = [](const void* of) {
    return reinterpret_cast<float*>(const_cast<char*>(static_cast<const char*>(of)) + sizeof(Scratch));
  };
  const auto run_last = [&] {
    if (!last) return;
    // Only the first span of a thread may begin inside of a task, so that what it leaves is safe.
    Scratch& own = scratch(last->begin > 0 ? last->end - last->begin : 0, last->task.rows);
    Runner(problem, *last, own, parts_in(&own)).run();
    sums_of_last = &own;
  };
  for_spans(args, max_rows, weight, team.count, [&](int owner, const Span& span) {
    shared = shared || !span.whole();
    if (owner == team.index) {
      if (last && Runner::joins(*last, span)) {
        ++last->heads;
        return;
      }
      run_last();
      last = span;
    } else if (last && last->begin == 0 && last->task.same(span.task)) {
      rests.push_back({owner, span.begin, span.end});
    }
  });
  run_last();
  if (!shared) return;
  team.barrier();
  if (rests.empty()) return;
  const Task& task = last->task;
  Runner runner(problem, *last, *sums_of_last, nullptr);
  for (const Rest& rest : rests) {
    float* const parts = parts_in(team.scratch_of(rest.owner));
    for (int64_t part = rest.begin; part < rest.end; ++part) {
      runner.merge(part, sums_of_part(parts, part - rest.begin, task.rows, problem.padded_dims()));
    }
  }
  runner.store_rows();
}

// tensors: q, k pages, v pages, block_tables, seq_lens, query_starts, kv_map, out, lse or none, kv_starts or none,
// scales of int8 pages or none; ints: causal; floats: scale
static Problem checked_problem(const Args& args, Team& team) {
  const Tensor &q = args.tensor(0), &kv_map = args.tensor(6);
  const Problem problem{
      q, args.tensor(1), args.tensor(2), args.tensor(3), args.tensor(7), args.tensor(8), args.tensor(10), args.real(0)};
  check_batch(q, problem.block_tables, args.tensor(4), args.tensor(5), kv_map, args.tensor(9), args.integer(0) != 0);
  clear_unserved_heads(problem.out, problem.lse, kv_map, team);
  return problem;
}

}  // namespace tilerank::TR_RUNG
