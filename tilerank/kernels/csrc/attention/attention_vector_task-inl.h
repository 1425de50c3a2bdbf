// Attention in vectors, compiled once per rung (no include guard; include after attention_task-inl.h).
//
// The cached tokens are processed in chunks of kChunk with online softmax, in powers of two:
//
//   s = q K^T scale log2(e);  m' = max(m, max s);  o = o 2^(m - m') + 2^(s - m') V;  l = l 2^(m - m') + sum 2^(s - m')
//
// Masked tokens (later tokens of the task, the rest of a page) contribute an exact zero.
//
// If several KV heads of one sequence belong to a thread and the sequence has a single query token, the heads are
// processed together, page by page. A page stores the keys of all heads, then their values. Such tasks are bound by
// reading pages, which is faster in long runs.
#include "attention/attention_product-inl.h"
#include "attention/attention_vector_scratch-inl.h"
#include "attention/attention_vector_sums-inl.h"

namespace tilerank::TR_RUNG {

template <class T>
class VectorTask : public VectorSums<VectorScratch<T>> {
 public:
  using Scratch = VectorScratch<T>;

  // parts: where the sums go if the span does not begin its task.
  VectorTask(const Problem& problem, const Span& span, Scratch& scratch, float* parts)
      : VectorSums<Scratch>(problem, span, scratch, parts),
        many_rows_(head_rows_ > kFewRows),
        prefetches_(problem.quantized() || !in_order<LeftOperand<T>, T>(head_rows_) || !follows_streams()) {}

  static bool can_join(const Span& span, const Span& next) {
    const int64_t rows = span.task.rows;
    return span.is_followed_by(next) && rows <= kFewRows && (span.heads + 1) * rows <= kVectorTaskRows;
  }

  void run() {
    if (task_.length == 0) {
      clear_rows<T>(problem_, task_);
      return;
    }
    load_queries();
    this->run_parts([&](int64_t part, const Sums& sums) { this->for_chunks(part, [&] { attend(sums); }); });
  }

 private:
  using VectorSums<Scratch>::problem_, VectorSums<Scratch>::scratch_, VectorSums<Scratch>::padded_;
  using VectorSums<Scratch>::span_, VectorSums<Scratch>::task_, VectorSums<Scratch>::head_rows_;
  using VectorSums<Scratch>::begin_, VectorSums<Scratch>::pages_;
  using VectorSums<Scratch>::first_row, VectorSums<Scratch>::end_row;
  using Left = typename Scratch::Left;
  static constexpr int64_t kScoreStride = Scratch::kScoreStride;

  void load_queries() {
    RowWalk row(task_);
    for (int64_t r = 0; r < task_.rows; ++r, row.next()) {
      const T* from = row.template element<T>(problem_.q);
      LeftOperand<T>* to = scratch_.q + r * Left::kStride;
      for_lanes(problem_.key_dims(), [&](int64_t i, auto lanes) { store(to + i, lanes.load(from + i)); });
      this->set_range(r, row);
    }
  }

  // Adds a chunk to the sums.
  void attend(const Sums& sums) {
    find_pages();
    for_pages([&](int64_t i, int64_t head) { multiply_keys(i, head); });
    this->softmax(sums, [&](int64_t head) { load_key_factors(head); }, [&](int64_t head) { load_value_factors(head); });
    if (many_rows_) {
      multiply_panel(sums);
    } else {
      for_pages([&](int64_t i, int64_t head) { multiply_values(sums, i, head); });
    }
  }

  // Visits the pages of all heads in the order of memory.
  template <class F>
  void for_pages(const F& f) const {
    for (int64_t i = 0; i < pages_; ++i) {
      for (int64_t head = 0; head < span_.heads; ++head) f(i, head);
    }
  }

  // Looks up the pages of the chunk and the keys that are read after it.
  void find_pages() {
    const auto number = [&](int64_t i) {
      return problem_.page(task_.sequence, task_.first_page + begin_ / kPageTokens + i);
    };
    for (int64_t i = 0; i < pages_; ++i) page_[i] = number(i);
    next_ = this->continues() ? address(problem_.k_pages, number(pages_), 0)
            : many_rows_      ? nullptr
                              : keys_of_next_task();
  }
  const char* keys_of_next_task() const {
    return problem_.quantized()
               ? reinterpret_cast<const char*>(problem_.template keys_after<int8_t>(task_, span_.heads))
               : reinterpret_cast<const char*>(problem_.template keys_after<T>(task_, span_.heads));
  }
  const char* address(const Tensor& pages, int64_t page, int64_t head) const {
    return pages.as<char>() + (page * pages.stride[0] + (task_.kv_head + head) * pages.stride[1]) * element();
  }
  const char* keys(int64_t i, int64_t head) const { return address(problem_.k_pages, page_[i], head); }
  const char* values(int64_t i, int64_t head) const { return address(problem_.v_pages, page_[i], head); }
  int64_t element() const { return problem_.quantized() ? 1 : sizeof(T); }
  // Spreads the prefetch of `page` over `operands` steps; null: prefetches nothing new.
  LinePrefetch ahead(const char* page, int64_t values, int64_t operands) const {
    return page && prefetches_ ? LinePrefetch{page, kPageTokens * values * element() / operands}
                               : LinePrefetch{keys(0, 0), 0};
  }
  // Few rows: the prefetch of what is read at least kAhead bytes after operand n of the chunk, and of what is read
  // far_ahead bytes after that.
  LinePrefetch ahead_of(int64_t n, int64_t values, int64_t operands) const {
    LinePrefetch lines = ahead(after(n, kAhead), values, operands);
    const char* const far = lines.step ? after(n, kAhead + far_ahead) : nullptr;
    if (far) lines.far = far - lines.at;
    return lines;
  }
  // What is read at least `bytes` after operand n of the chunk. Operands are the keys of every page and head, then the
  // values. Null if it is not known.
  const char* after(int64_t n, int64_t bytes) const {
    const int64_t all = pages_ * span_.heads, size = kPageTokens * padded_ * element();
    n += (bytes + size - 1) / size;
    if (n < all) return keys(n / span_.heads, n % span_.heads);
    n -= all;
    if (n < all) return values(n / span_.heads, n % span_.heads);
    return next_ ? next_ + (n - all) * problem_.k_pages.stride[1] * element() : nullptr;
  }

  template <class From>
  void widen_groups(const char* from, int64_t groups, int64_t size, LeftOperand<T>* to, int64_t stride) {
    for (int64_t g = 0; g < groups; ++g, to += stride) {
      const From* const group = reinterpret_cast<const From*>(from) + g * size;
      if constexpr (std::is_same_v<From, LeftOperand<T>>) {
        std::memcpy(static_cast<void*>(to), group, static_cast<size_t>(size) * sizeof(From));
      } else {
        widen(group, size, to);
      }
    }
  }
  // Widens `groups` groups of 16 lanes x `values` values of a page to right-hand operands.
  void widen_page(const char* from, int64_t groups, int64_t values, LeftOperand<T>* to, int64_t stride) {
    if (problem_.quantized()) {
      widen_groups<int8_t>(from, groups, 16 * values, to, stride);
    } else {
      widen_groups<T>(from, groups, 16 * values, to, stride);
    }
  }

  // Rows of a head: those of which some attend to page i of the chunk, in steps of kRowStep.
  struct Rows {
    int64_t first, count;
  };
  Rows rows_of_page(int64_t i, int64_t head) const {
    const int64_t first = first_row(i * kPageTokens), end = end_row((i + 1) * kPageTokens);
    return {head * head_rows_ + first, end - first};
  }

  void multiply_keys(int64_t i, int64_t head) {
    static constexpr float kNothing[kPageTokens] = {};
    const int64_t dims = problem_.key_dims();
    const Rows rows = rows_of_page(i, head);
    const char* const from = keys(i, head);
    if (problem_.quantized())
      problem_.fetch_scales(page_[i], task_.kv_head + head);  // one page at a time: many prefetches at once are dropped
    const char* const next = many_rows_ && i + 1 < pages_ ? keys(i + 1, 0) : nullptr;
    const auto multiply = [&](const auto* keys) {
      constexpr int64_t x = kPair<std::remove_cvref_t<decltype(*keys)>>;
      const int64_t operands = kPageTokens / 16 * dims / x;
      LinePrefetch lines[] = {
          many_rows_ ? ahead(next, dims, operands) : ahead_of(i * span_.heads + head, dims, operands),
          ahead(many_rows_ ? values(i, 0) : nullptr, padded_, operands)};
      product(Left{scratch_.q}.from(rows.first), rows.count, RightOperand{keys, kPageTokens / 16, dims / x, 16 * dims},
              {kNothing, 0}, {scratch_.s + rows.first * kScoreStride + i * kPageTokens, kScoreStride}, lines);
    };
    if (!many_rows_) {
      return problem_.quantized() ? multiply(reinterpret_cast<const int8_t*>(from))
                                  : multiply(reinterpret_cast<const T*>(from));
    }
    widen_page(from, kPageTokens / 16, dims, scratch_.panel, 16 * dims);
    multiply(static_cast<const LeftOperand<T>*>(scratch_.panel));
  }

  void load_key_factors(int64_t head) {
    const Vec scale = set(problem_.scale * kLog2E);
    for (int64_t i = 0; i < pages_; ++i) {
      const float* const from = problem_.key_scales(page_[i], task_.kv_head + head);
      float* const to = scratch_.key_factor + i * kPageTokens;
      for (int64_t token = 0; token < kPageTokens; token += kLanes) store(to + token, load(from + token) * scale);
    }
  }

  // Scales of masked tokens may be NaN, so their factors are set to zero.
  void load_value_factors(int64_t head) {
    for (int64_t i = 0; i < pages_; ++i) {
      const int64_t start = begin_ + i * kPageTokens;
      const float* const from = problem_.value_scales(page_[i], task_.kv_head + head);
      float* const to = scratch_.value_factor + i * kPageTokens;
      std::copy_n(from, kPageTokens, to);
      std::fill_n(to, std::clamp<int64_t>(task_.first_token - start, 0, kPageTokens), 0.0f);
      const int64_t seen = std::clamp<int64_t>(task_.length - start, 0, kPageTokens);
      std::fill_n(to + seen, kPageTokens - seen, 0.0f);
    }
  }

  // Returns the values of a page. The first and the last page are copied with masked tokens zeroed (codes need no
  // copy); the copy is valid until the next call.
  const char* seen_values(int64_t i, int64_t head) {
    const char* const page = values(i, head);
    if (problem_.quantized()) return page;
    const int64_t start = begin_ + i * kPageTokens, first_token = std::max<int64_t>(task_.first_token - start, 0);
    const int64_t seen = std::min(task_.length - start, kPageTokens);
    if (first_token == 0 && seen == kPageTokens) return page;
    mask_page(reinterpret_cast<const T*>(page), first_token, seen, padded_, scratch_.masked);
    return reinterpret_cast<const char*>(scratch_.masked);
  }

  // Few rows: multiplies a page of values as it is stored.
  void multiply_values(const Sums& sums, int64_t i, int64_t head) {
    const Rows rows = rows_of_page(i, head);
    float* const o = sums.values + rows.first * padded_;
    const char* const from = seen_values(i, head);
    const auto multiply = [&](const auto* values) {
      constexpr int64_t x = kPair<std::remove_cvref_t<decltype(*values)>>;
      LinePrefetch lines[] = {ahead_of((pages_ + i) * span_.heads + head, padded_, padded_ / 16 * kPageTokens / x),
                              ahead(nullptr, 0, 1)};
      product(Left{scratch_.p + i * kPageTokens}.from(rows.first), rows.count,
              RightOperand{values, padded_ / 16, kPageTokens / x, 16 * kPageTokens}, {o, padded_}, {o, padded_}, lines);
    };
    problem_.quantized() ? multiply(reinterpret_cast<const int8_t*>(from)) : multiply(reinterpret_cast<const T*>(from));
  }

  // Many rows: multiplies the widened chunk at once, each row from the first to the last page that it attends to.
  void multiply_panel(const Sums& sums) {
    constexpr int64_t x = kPair<LeftOperand<T>>;
    for (int64_t i = 0; i < pages_; ++i) {
      widen_page(seen_values(i, 0), padded_ / 16, kPageTokens, scratch_.panel + i * 16 * kPageTokens, 16 * kChunk);
    }
    // Consecutive steps of rows that attend to the same pages are multiplied together.
    for (int64_t first = 0, end; first < task_.rows; first = end) {
      const Pages pages = pages_of_step(first);
      end = first;
      do {
        end = std::min(end + Scratch::kRowStep, task_.rows);
      } while (end < task_.rows && pages_of_step(end) == pages);
      if (pages.first >= pages.end) continue;
      const int64_t steps = (pages.end - pages.first) * kPageTokens / x;
      LinePrefetch lines[] = {ahead(end == task_.rows ? next_ : nullptr, problem_.key_dims(), padded_ / 16 * steps),
                              ahead(nullptr, 0, 1)};
      float* const o = sums.values + first * padded_;
      const LeftOperand<T>* const panel = scratch_.panel + pages.first * 16 * kPageTokens;
      product(Left{scratch_.p + pages.first * kPageTokens}.from(first), end - first,
              RightOperand<LeftOperand<T>>{panel, padded_ / 16, steps, 16 * kChunk}, {o, padded_}, {o, padded_}, lines);
    }
  }

  struct Pages {  // of the chunk
    int64_t first, end;
    bool operator==(const Pages&) const = default;
  };
  // The pages to which some of kRowStep rows attend, counted from the chunk's first one.
  Pages pages_of_step(int64_t row) const {
    const int64_t last = std::min(row + Scratch::kRowStep, task_.rows) - 1;
    const int64_t end = (scratch_.visible[last] - begin_ + kPageTokens - 1) / kPageTokens;
    return {std::max<int64_t>(scratch_.first[row] - begin_, 0) / kPageTokens, std::min(end, pages_)};
  }

  const bool many_rows_;        // whether a head has many rows
  const bool prefetches_;       // whether to prefetch
  int64_t page_[kChunkPages];   // numbers of the chunk's pages
  const char* next_ = nullptr;  // the keys that are read after it
};

template <class T>
static void attention_by_vectors(const Problem& problem, Team& team) {
  run_spans<VectorTask<T>>(
      problem, {kVectorTaskRows, kPartTokens}, [](const Task& task) { return task.rows + 8; }, team);
}

// Computes the attention of a checked problem. Defined by the file that includes this one.
static void run_attention(const Problem& problem, Team& team);

TR_ENTRY(attention, Team& team, const Tensor& q, const Tensor& cache_k, const Tensor& cache_v,
         const Tensor& cache_scales, const Tensor& page_tables, const Tensor& seq_lens, const Tensor& query_starts,
         const Tensor& kv_map, float scale, bool causal, const Tensor& lse, const Tensor& kv_starts, int64_t window,
         const Tensor& sinks, float softcap, const Tensor& visible, const Tensor& out) {
  const Problem problem{"attention",  q,       cache_k,   cache_v, cache_scales, page_tables, seq_lens,
                        query_starts, kv_map,  kv_starts, scale,   causal,       out,         lse,
                        window,       softcap, sinks,     visible};
  check_batch(problem.kernel, q.size[0], page_tables, seq_lens, query_starts, kv_starts, causal, visible);
  check_kv_map(kv_map, q.size[1]);
  clear_unserved_heads(out, lse, kv_map, team);
  run_attention(problem, team);
}

}  // namespace tilerank::TR_RUNG
