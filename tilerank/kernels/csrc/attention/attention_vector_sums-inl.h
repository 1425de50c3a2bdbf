// The softmax of a task's rows and their running sums (included by attention_vector_task-inl.h; no include guard).

namespace tilerank::TR_RUNG {

// Scratch: memory as VectorScratch has it.
template <class Scratch>
class VectorSums {
 public:
  // Merges the sums over a part into those over all parts before it.
  void merge(int64_t, const Sums& sums) {
    for (int64_t r = 0; r < task_.rows; ++r) {
      const float max = std::max(scratch_.all_max[r], sums.max[r]);
      const Vec of_all = exp2(set(scratch_.all_max[r] - max)), of_part = exp2(set(sums.max[r] - max));
      merge_sums(scratch_.all_sum + r * kLanes, of_all, sums.weights + r * kLanes, of_part);
      for (int64_t i = r * padded_; i < (r + 1) * padded_; i += kLanes) {
        merge_sums(scratch_.all_o + i, of_all, sums.values + i, of_part);
      }
      scratch_.all_max[r] = max;
    }
  }

  void store_rows() {
    RowWalk row(task_);
    for (int64_t r = 0; r < task_.rows; ++r, row.next()) {
      const float* const o = scratch_.all_o + r * padded_;
      float max = scratch_.all_max[r], of_row = sum(load(scratch_.all_sum + r * kLanes));
      Vec factor = set(1.0f);
      if (problem_.sinks) {
        const float sink = problem_.sinks.template as<float>()[row.head()] * kLog2E, all_max = max;
        max = std::max(all_max, sink);
        factor = exp2(set(all_max - max));
        of_row = of_row * first_of(factor) + first_of(exp2(set(sink - max)));
      }
      if (problem_.lse) *row.template element<float>(problem_.lse) = max * kLn2 + std::log(of_row);
      T* out = row.template element<T>(problem_.out);
      for_lanes(problem_.value_dims(), [&](int64_t i, auto lanes) {
        // + 0 turns a negative zero into a positive one, whatever was summed.
        lanes.store(out + i, load(o + i) * factor / set(of_row) + zero());
      });
    }
  }

 protected:
  using T = typename Scratch::Value;

  VectorSums(const Problem& problem, const Span& span, Scratch& scratch, float* parts)
      : problem_(problem),
        scratch_(scratch),
        padded_(problem.padded_dims()),
        span_(span),
        task_(span.all()),
        head_rows_(span.task.rows),
        parts_(parts) {}

  // Calls attend(part, sums) for the parts of the span, which adds them to sums that are zero.
  template <class F>
  void run_parts(const F& attend) {
    for (int64_t part = span_.begin; part < span_.end; ++part) {
      if (!span_.leads()) {
        attend(part, cleared(sums_of_part(parts_, part - span_.begin, task_.rows, padded_)));
      } else if (part == span_.begin) {
        attend(part, cleared({scratch_.all_o, scratch_.all_sum, scratch_.all_max}));
      } else {
        const Sums sums = cleared({scratch_.o, scratch_.sum, scratch_.max});
        attend(part, sums);
        merge(part, sums);
      }
    }
    if (span_.whole()) store_rows();
  }

  // Calls f() for every chunk of a part, after setting begin_ and pages_. Chunks are counted from the first token of
  // the task's pages; the first one begins with the first page that a row attends to.
  template <class F>
  void for_chunks(int64_t part, const F& f) {
    const int64_t end = std::min(task_.end(), (part + 1) * task_.part_tokens);
    begin_ = std::max(part * task_.part_tokens, task_.begin() / kPageTokens * kPageTokens);
    for (; begin_ < end; begin_ = end_of_chunk()) {
      pages_ = (std::min(end_of_chunk(), end) - begin_ + kPageTokens - 1) / kPageTokens;
      f();
    }
  }
  int64_t end_of_chunk() const { return (begin_ / kChunk + 1) * kChunk; }
  // Whether the span goes on after the chunk, with the page after those of the chunk.
  bool continues() const { return end_of_chunk() < std::min(task_.end(), span_.end * task_.part_tokens); }

  // Keeps which tokens row r attends to. Neither bound decreases from one row of a head to the next.
  void set_range(int64_t r, const RowWalk& row) {
    scratch_.first[r] = row.begin();
    scratch_.visible[r] = row.end();
  }

  // Returns a lower bound, in steps of kRowStep, of the first row of a head that attends to token `first` of the chunk
  // or to a later one.
  int64_t first_row(int64_t first) const {
    constexpr int64_t kStep = Scratch::kRowStep;
    int64_t r = 0;
    while (r + kStep < head_rows_ && scratch_.visible[r + kStep - 1] <= begin_ + first) r += kStep;
    return r;
  }
  // Returns an upper bound, in steps of kRowStep, of the rows of a head that attend to a token before `end` of the
  // chunk.
  int64_t end_row(int64_t end) const {
    constexpr int64_t kStep = Scratch::kRowStep;
    int64_t r = kStep;
    while (r < head_rows_ && scratch_.first[r] < begin_ + end) r += kStep;
    return std::min(r, head_rows_);
  }

  // Turns the scores of the chunk into probabilities and rescales the sums so far to the new maxima.
  // key_factors(head) and value_factors(head) fill scratch_.key_factor and scratch_.value_factor over an int8 cache.
  template <class Keys, class Values>
  void softmax(const Sums& sums, const Keys& key_factors, const Values& value_factors) {
    const int64_t width = pages_ * kPageTokens;
    const Vec scale = set(problem_.scale * kLog2E);
    for (int64_t head = 0; head < span_.heads; ++head) {
      const auto find = [&](const auto& factor) {
        const auto scaled = [&](const float* s, int64_t i) { return load(s + i) * factor(i); };
        if (problem_.softcap > 0) {
          const Vec cap = set(problem_.softcap * kLog2E), part = set(1 / (problem_.softcap * kLog2E));
          const auto capped = [&](const float* s, int64_t i) { return cap * tanh(scaled(s, i) * part); };
          for_rows(head, [&](int64_t r) { find_max(r, width, capped, sums.max[r]); });
        } else {
          for_rows(head, [&](int64_t r) { find_max(r, width, scaled, sums.max[r]); });
        }
      };
      if (problem_.quantized()) {
        key_factors(head);
        find([&](int64_t i) { return load(scratch_.key_factor + i); });
      } else {
        find([&](int64_t) { return scale; });
      }
    }
    for (int64_t r = 0; r < task_.rows; r += kLanes) {
      store(scratch_.decay + r, exp2(load(sums.max + r) - load(scratch_.new_max + r)));
    }
    if (!problem_.quantized()) std::fill_n(scratch_.value_factor, width, 1.0f);
    for (int64_t head = 0; head < span_.heads; ++head) {
      if (problem_.quantized()) value_factors(head);
      for_rows(head, [&](int64_t r) {
        if (attends(r, width)) {
          weigh_row(r, width, sums);
        } else {
          for (int64_t i = 0; i < width; i += kLanes)
            store(scratch_.p + r * Scratch::Probabilities::kStride + i, zero());
        }
      });
    }
  }

  template <class F>
  void for_rows(int64_t head, const F& f) const {
    for (int64_t r = head * head_rows_; r < (head + 1) * head_rows_; ++r) f(r);
  }

  // Whether row r attends to any of the first `width` tokens of the chunk.
  bool attends(int64_t r, int64_t width) const {
    return scratch_.visible[r] > begin_ && scratch_.first[r] < begin_ + width;
  }

  // Sets the scores of a row to score(scores, token), those of masked tokens to -inf, and computes the new maximum.
  template <class F>
  void find_max(int64_t r, int64_t width, const F& score, float max_so_far) {
    constexpr float minus_infinity = -std::numeric_limits<float>::infinity();
    float* const s = scratch_.s + r * Scratch::kScoreStride;
    scratch_.new_max[r] = max_so_far;
    if (!attends(r, width)) return;
    Vec largest = set(minus_infinity);
    for (int64_t i = 0; i < width; i += kLanes) {
      const Vec x = score(s, i);
      store(s + i, x);
      largest = max(largest, x);
    }
    const int64_t first = std::max<int64_t>(scratch_.first[r] - begin_, 0), end = scratch_.visible[r] - begin_;
    if (first > 0 || end < width) {
      std::fill(s, s + first, minus_infinity);
      std::fill(s + std::min(end, width), s + width, minus_infinity);
      largest = set(minus_infinity);
      for (int64_t i = 0; i < width; i += kLanes) largest = max(largest, load(s + i));
    }
    scratch_.new_max[r] = std::max(max_so_far, max_of(largest));
  }

  void weigh_row(int64_t r, int64_t width, const Sums& sums) {
    const float* const s = scratch_.s + r * Scratch::kScoreStride;
    auto* const p = scratch_.p + r * Scratch::Probabilities::kStride;
    const Vec max = set(scratch_.new_max[r]), decay = set(scratch_.decay[r]);
    Vec total = load(sums.weights + r * kLanes) * decay;
    for (int64_t i = 0; i < width; i += kLanes) {
      const Vec e = exp2(load(s + i) - max);
      total = total + e;
      store(p + i, e * load(scratch_.value_factor + i));
    }
    store(sums.weights + r * kLanes, total);
    if (scratch_.new_max[r] != sums.max[r]) {  // otherwise the factor is exactly 1
      float* const o = sums.values + r * padded_;
      for (int64_t i = 0; i < padded_; i += kLanes) store(o + i, load(o + i) * decay);
    }
    sums.max[r] = scratch_.new_max[r];
  }

  const Problem& problem_;
  Scratch& scratch_;
  const int64_t padded_;  // dims of a value, padded to whole groups of lanes
  const Span& span_;
  const Task task_;  // of all heads
  const int64_t head_rows_;
  int64_t begin_ = 0, pages_ = 0;  // the first token and the pages of the current chunk

 private:
  Sums cleared(const Sums& sums) const {
    std::fill_n(sums.values, task_.rows * padded_, 0.0f);
    std::fill_n(sums.weights, task_.rows * kLanes, 0.0f);
    std::fill_n(sums.max, task_.rows, -std::numeric_limits<float>::infinity());
    return sums;
  }

  float* const parts_;
};

}  // namespace tilerank::TR_RUNG
