// The tasks of attention, compiled once per rung (no include guard; include after attention_batch.h).
//
// A row is a query head of a query token; a task is a limited number of rows of one sequence and KV head. The bits of a
// row depend only on the row and its keys: chunks are counted from the first page of the sequence, the sums of a row
// always run in the same order, part by part, and masked tokens (later tokens of the task, the rest of a page)
// contribute an exact zero.

namespace tilerank::TR_RUNG {

constexpr int64_t kMaxDim = 512;
// Tokens of a part of attention. The sums over each part are merged by their maxima (flash-decoding), so that threads
// can share a task by its parts.
constexpr int64_t kPartTokens = 2048;

struct TaskSizes {
  int64_t rows;         // the most rows of a task
  int64_t part_tokens;  // tokens of a part
};

struct Task {
  int64_t sequence;
  int64_t first_page;            // index in the page table of the page with the first token
  int64_t first_token, length;   // the tokens [first_token, length) of these pages are attended to
  int64_t query, queries;        // the sequence's rows of q
  int64_t kv_head, head, heads;  // first query head and number of query heads
  int64_t row, rows;             // this task's share of the queries * heads rows
  int64_t part_tokens;
  bool causal;          // otherwise every row attends to all tokens
  int64_t window;       // the most tokens before and with its own that a row attends to, or 0: all
  const int32_t* ends;  // of the tokens that each of the queries attends to, counted from first_token; or null

  bool same(const Task& other) const {
    return sequence == other.sequence && kv_head == other.kv_head && row == other.row;
  }
  int64_t token(int64_t r) const { return (row + r) / heads; }
  // The tokens [begin_of, end_of) that a query attends to, counted like `length`. Neither bound decreases from one
  // query to the next.
  int64_t begin_of(int64_t query) const {
    return window ? std::max(first_token, length - queries + query + 1 - window) : first_token;
  }
  int64_t end_of(int64_t query) const {
    if (ends) return first_token + ends[query];
    return causal ? length - queries + query + 1 : length;
  }
  // The tokens [begin, end) that any row attends to.
  int64_t begin() const { return begin_of(token(0)); }
  int64_t end() const { return end_of(token(rows - 1)); }
  int64_t first_part() const { return begin() / part_tokens; }
  int64_t end_part() const { return std::max<int64_t>((end() + part_tokens - 1) / part_tokens, 1); }
  template <class T>
  T* element(const Tensor& t, int64_t r) const {
    return t.row<T>(query + token(r)) + (head + (row + r) % heads) * t.stride[1];
  }
};

struct Problem {
  const char* kernel;
  const Tensor &q, &k_pages, &v_pages, &scales;                              // scales: of int8 pages, or none
  const Tensor &page_tables, &seq_lens, &query_starts, &kv_map, &kv_starts;  // kv_starts: or none
  float scale;
  bool causal;
  const Tensor &out, &lse;                // lse: or none
  int64_t window = 0;                     // 0: none
  float softcap = 0;                      // 0: none
  const Tensor sinks = {}, visible = {};  // or none

  bool quantized() const { return k_pages.dtype == DType::i8; }
  int64_t key_dims() const { return q.size[2]; }
  int64_t value_dims() const { return out.size[2]; }
  int64_t padded_dims() const { return (value_dims() + 15) / 16 * 16; }

  // Returns the number of page `index` of a sequence. Throws if it is outside the cache.
  int64_t page(int64_t sequence, int64_t index) const {
    const int32_t page = page_tables.row<int32_t>(sequence)[index];
    if (page < 0 || page >= k_pages.size[0]) {
      throw Error(std::string(kernel) + ": page_tables: expected pages in [0, " + std::to_string(k_pages.size[0]) +
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
  // The scales of the codes of each token of a page.
  const float* key_scales(int64_t page, int64_t head) const {
    return scales.row<float>(page) + head * scales.stride[1];
  }
  const float* value_scales(int64_t page, int64_t head) const { return key_scales(page, head) + kPageTokens; }
  void fetch_scales(int64_t page, int64_t head) const {
    const float* const scales = key_scales(page, head);
    for (int64_t i = 0; i < 2 * kPageTokens; i += 16)
      _mm_prefetch(reinterpret_cast<const char*>(scales + i), _MM_HINT_T0);
  }

  // Returns the first task of a sequence and KV head, of at most `rows` rows.
  Task first_task(int64_t sequence, int64_t kv_head, int64_t rows, int64_t part_tokens) const {
    const int64_t length = seq_lens.as<int32_t>()[sequence];
    const int64_t first = kv_starts && length > 0 ? kv_starts.as<int32_t>()[sequence] : 0;
    const int64_t start = query_starts.as<int32_t>()[sequence],
                  queries = query_starts.as<int32_t>()[sequence + 1] - start;
    const int32_t* heads = kv_map.row<int32_t>(kv_head);
    return {sequence,
            first / kPageTokens,
            first % kPageTokens,
            first % kPageTokens + length,
            start,
            queries,
            kv_head,
            heads[0],
            heads[1],
            0,
            std::min(rows, queries * heads[1]),
            part_tokens,
            causal,
            window,
            visible ? visible.as<int32_t>() + start : nullptr};
  }

  // Returns the keys that this thread probably reads after `heads` KV heads from the task's on, for prefetching.
  template <class T>
  const T* keys_after(const Task& task, int64_t heads) const {
    const int64_t head = task.kv_head + heads;
    if (head < k_pages.size[1]) return keys_from<T>(task, task.begin(), head);
    if (task.sequence + 1 == page_tables.size[0]) return keys<T>(0, 0);
    const Task next = first_task(task.sequence + 1, 0, task.rows, task.part_tokens);
    return keys_from<T>(next, next.begin_of(0), 0);
  }

 private:
  // The keys of a token and those after it, for prefetching: page numbers are not checked.
  template <class T>
  const T* keys_from(const Task& task, int64_t token, int64_t head) const {
    const int64_t index = std::min(task.first_page + token / kPageTokens, page_tables.size[1] - 1);
    const int64_t page = page_tables.row<int32_t>(task.sequence)[index];
    return keys<T>(std::clamp<int64_t>(page, 0, k_pages.size[0] - 1), head);
  }
};

// Iterates over the rows of a task without a division per row. by_heads: all tokens of one head before those of the
// next; the task must then consist of whole tokens.
class RowWalk {
 public:
  explicit RowWalk(const Task& task, bool by_heads = false)
      : task_(&task), token_(task.token(0)), head_(task.row % task.heads), by_heads_(by_heads) {}

  template <class T>
  T* element(const Tensor& t) const {
    return t.row<T>(task_->query + token_) + (task_->head + head_) * t.stride[1];
  }
  // The tokens [begin, end) that the row attends to, as those of the task.
  int64_t begin() const { return task_->begin_of(token_); }
  int64_t end() const { return task_->end_of(token_); }
  int64_t head() const { return task_->head + head_; }
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

// Calls f(task) for every task, in the order of the batch.
template <class F>
static void for_tasks(const Problem& problem, const TaskSizes& sizes, F&& f) {
  for (int64_t sequence = 0; sequence < problem.seq_lens.size[0]; ++sequence) {
    for (int64_t kv_head = 0; kv_head < problem.kv_map.size[0]; ++kv_head) {
      Task task = problem.first_task(sequence, kv_head, sizes.rows, sizes.part_tokens);
      const int64_t rows = task.queries * task.heads;
      for (; task.row < rows; task.row += sizes.rows) {
        task.rows = std::min(sizes.rows, rows - task.row);
        f(task);
      }
    }
  }
}

// Clears the output of rows that attend to no tokens.
template <class T>
static void clear_rows(const Problem& problem, const Task& task) {
  for (int64_t r = 0; r < task.rows; ++r) {
    std::memset(static_cast<void*>(task.element<T>(problem.out, r)), 0,
                sizeof(T) * static_cast<size_t>(problem.value_dims()));
    if (problem.lse) *task.element<float>(problem.lse, r) = -std::numeric_limits<float>::infinity();
  }
}

// Parts begin to end of a task, which counts them from the first token of its pages. Or, with heads > 1, all parts of
// the tasks of `heads` consecutive KV heads with consecutive query heads, of a sequence with one query token.
struct Span {
  Task task;  // the first task
  int64_t begin, end, heads = 1;

  bool leads() const { return begin == task.first_part(); }
  bool whole() const { return leads() && end == task.end_part(); }
  bool is_followed_by(const Span& next) const {
    return task.queries == 1 && whole() && next.whole() && task.sequence == next.task.sequence &&
           task.kv_head + heads == next.task.kv_head && task.head + heads * task.heads == next.task.head &&
           task.rows == next.task.rows && task.rows == task.heads;
  }
  // The rows of all tasks as one task.
  Task all() const {
    Task all = task;
    all.heads *= heads;
    all.rows *= heads;
    return all;
  }
};

// Sums of a task's rows over a part: weighted values, softmax weights by lane, and the maximum subtracted from the
// scores.
struct Sums {
  float *values, *weights, *max;
};

// all = all * all_factor + part * part_factor, a vector of sums over a part merged into those over all before it.
static inline void merge_sums(float* all, Vec all_factor, const float* part, Vec part_factor) {
  store(all, fma(load(part), part_factor, load(all) * all_factor));
}

// Memory for the sums of consecutive parts; dims: room per row for values.
static inline int64_t floats_of_part(int64_t rows, int64_t dims) { return (rows + 31) / 32 * 32 * (dims + 16 + 16); }
static inline Sums sums_of_part(float* parts, int64_t number, int64_t rows, int64_t dims) {
  float* const at = parts + number * floats_of_part(rows, dims);
  rows = (rows + 31) / 32 * 32;
  return {at, at + rows * dims, at + rows * (dims + 16)};
}

// Calls f(owner, span) for all spans of all threads, in the order of the batch. token_cost(task): cost per token of a
// task.
template <class Cost, class F>
static void for_spans(const Problem& problem, const TaskSizes& sizes, Cost&& token_cost, int threads, F&& f) {
  WorkPartition partition{0, threads};
  const auto cost = [&](const Task& task) { return token_cost(task) * (task.end() - task.begin() + 1); };
  for_tasks(problem, sizes, [&](const Task& task) { partition.total += cost(task); });
  for_tasks(problem, sizes, [&](const Task& task) {
    const int64_t end_part = task.end_part(), of_token = token_cost(task);
    const auto owner = [&](int64_t part) {
      const int64_t first = std::max(task.begin(), part * sizes.part_tokens) - task.begin();
      const int64_t end = std::min(task.end(), (part + 1) * sizes.part_tokens) - task.begin();
      return partition.owner(first * of_token, (end - first) * of_token);
    };
    for (int64_t begin = task.first_part(), end; begin < end_part; begin = end) {
      const int thread = owner(begin);
      end = owner(end_part - 1) == thread ? end_part : begin + 1;
      while (end < end_part && owner(end) == thread) ++end;
      f(thread, Span{task, begin, end});
    }
    partition.preceding += cost(task);
  });
}

// Runs this thread's spans in order, each with a Runner; spans that Runner::can_join share one. A Runner provides
// run(). For a task shared by several threads, the thread with the first part then calls merge(part, sums) for the
// parts of the others, in order, and store_rows().
template <class Runner, class Cost>
static void run_spans(const Problem& problem, const TaskSizes& sizes, Cost&& token_cost, Team& team) {
  using Scratch = typename Runner::Scratch;
  struct Remainder {
    int owner;
    int64_t begin, end;
  };
  std::optional<Span> last;  // or the first of several joined spans
  Scratch* sums_of_last = nullptr;
  std::vector<Remainder> remainders;  // parts of the last span's task that belong to other threads
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
    // Only the first span of a thread can begin inside a task, so no later span overwrites its sums.
    Scratch& own = scratch(last->leads() ? 0 : last->end - last->begin, last->task.rows);
    Runner(problem, *last, own, parts_in(&own)).run();
    sums_of_last = &own;
  };
  for_spans(problem, sizes, token_cost, team.count, [&](int owner, const Span& span) {
    shared = shared || !span.whole();
    if (owner == team.index) {
      if (last && Runner::can_join(*last, span)) {
        ++last->heads;
        return;
      }
      run_last();
      last = span;
    } else if (last && last->leads() && last->task.same(span.task)) {
      remainders.push_back({owner, span.begin, span.end});
    }
  });
  run_last();
  if (!shared) return;
  team.barrier();
  if (remainders.empty()) return;
  const Task& task = last->task;
  Runner runner(problem, *last, *sums_of_last, nullptr);
  for (const Remainder& remainder : remainders) {
    float* const parts = parts_in(team.scratch_of(remainder.owner));
    for (int64_t part = remainder.begin; part < remainder.end; ++part) {
      runner.merge(part, sums_of_part(parts, part - remainder.begin, task.rows, problem.padded_dims()));
    }
  }
  runner.store_rows();
}

}  // namespace tilerank::TR_RUNG
