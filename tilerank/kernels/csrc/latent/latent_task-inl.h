// The tasks of latent attention, compiled once per rung (no include guard; include after attention_task-inl.h).
//
// Latent attention is attention with one KV head: a key is a row of the latent cache, a value the latent in it. Each
// page is packed into panels twice, as keys and as values, which all rows of a task share. The sums are those of
// attention_vector_task-inl.h.
#include "attention/attention_product-inl.h"
#include "attention/attention_vector_scratch-inl.h"
#include "attention/attention_vector_sums-inl.h"
#include "simd/transpose-inl.h"
#include "latent/latent_panels-inl.h"
#ifdef TR_AMX
#include "latent/latent_tiles-inl.h"
#endif

namespace tilerank::TR_RUNG {

constexpr int64_t kMostLatentDims = 512, kMostRowDims = kMostLatentDims + 64;
constexpr int64_t kLatentTaskRows = 128;
// There is one KV head, so threads often share a sequence. A part is a few chunks, whose products take many times as
// long as merging its sums.
constexpr int64_t kLatentPartTokens = 2 * kChunk;

template <class T>
struct LatentScratch {
  using Value = T;
  using Left = LeftRows<LeftOperand<T>, kMostRowDims>;
  using Probabilities = LeftRows<LeftOperand<T>, kChunk>;
  static constexpr int64_t kRows = kLatentTaskRows, kScoreStride = kChunk + 16;
  // Distance of groups of 16 dims in `values`: one cache line more than they have, so that they spread over the sets.
  static constexpr int64_t kGroupStride = 16 * kChunk + 64 / static_cast<int64_t>(sizeof(LeftOperand<T>));
#ifdef TR_AMX
  static constexpr int64_t kRowStep = 16;  // whole tiles
#else
  static constexpr int64_t kRowStep = kSumRows;
#endif
  alignas(64) LeftOperand<T> q[kRows * Left::kStride];
  alignas(64) float s[kRows * kScoreStride];
  alignas(64) LeftOperand<T> p[kRows * Probabilities::kStride];
  alignas(64) LeftOperand<T> keys[kMostRowDims * kPageTokens];             // of a page
  alignas(64) LeftOperand<T> values[kMostLatentDims / 16 * kGroupStride];  // of a chunk
  alignas(64) float key_factor[kChunk], value_factor[kChunk];
  // Sums over one part, and merged sums over all parts so far.
  alignas(64) float o[kRows * kMostLatentDims], all_o[kRows * kMostLatentDims];
  alignas(64) float sum[kRows * kLanes], all_sum[kRows * kLanes];  // by lane; reduced at the end
  alignas(64) float max[kRows], all_max[kRows], new_max[kRows], decay[kRows];
  int64_t first[kRows], visible[kRows];  // the tokens [first, visible) that each row attends to
};

// q_rope: the rotated part of the queries, of which problem.q has the latent part.
struct LatentProblem : Problem {
  const Tensor& q_rope;
};

template <class T>
class LatentTask : public VectorSums<LatentScratch<T>> {
 public:
  using Scratch = LatentScratch<T>;

  LatentTask(const Problem& problem, const Span& span, Scratch& scratch, float* parts)
      : VectorSums<Scratch>(problem, span, scratch, parts),
        q_rope_(static_cast<const LatentProblem&>(problem).q_rope),
        latent_dims_(problem.key_dims()),
        dims_(problem.k_pages.size[2]) {}

  static bool can_join(const Span&, const Span&) { return false; }

  void run() {
    if (task_.length == 0) {
      clear_rows<T>(problem_, task_);
      return;
    }
    load_queries();
#ifdef TR_AMX
    const Tiles tiles(latent_tiles());
#endif
    this->run_parts([&](int64_t part, const Sums& sums) { this->for_chunks(part, [&] { attend(sums); }); });
  }

 private:
  using VectorSums<Scratch>::problem_, VectorSums<Scratch>::scratch_, VectorSums<Scratch>::padded_;
  using VectorSums<Scratch>::span_, VectorSums<Scratch>::task_, VectorSums<Scratch>::head_rows_;
  using VectorSums<Scratch>::begin_, VectorSums<Scratch>::pages_, VectorSums<Scratch>::first_row;
  using A = LeftOperand<T>;
  using Left = typename Scratch::Left;
  using Probabilities = typename Scratch::Probabilities;
  static constexpr int64_t kScoreStride = Scratch::kScoreStride;

  void load_queries() {
    RowWalk row(task_);
    for (int64_t r = 0; r < task_.rows; ++r, row.next()) {
      A* const to = scratch_.q + r * Left::kStride;
      const auto load_part = [&](const Tensor& q, A* part) {
        const T* const from = row.template element<T>(q);
        for_lanes(q.size[2], [&](int64_t i, auto lanes) { store(part + i, lanes.load(from + i)); });
      };
      load_part(problem_.q, to);
      load_part(q_rope_, to + latent_dims_);
      std::fill(to + latent_dims_ + q_rope_.size[2], to + dims_, A{});
      this->set_range(r, row);
    }
  }

  // Adds a chunk to the sums.
  void attend(const Sums& sums) {
    for (int64_t i = 0; i < pages_; ++i) page_[i] = number(i);
    next_ = this->continues() ? number(pages_) : -1;
    problem_.quantized() ? multiply_keys<int8_t>() : multiply_keys<T>();
    const auto load_factors = [&](float* to, float factor) {
      for (int64_t i = 0; i < pages_; ++i) {
        const float* const scales = problem_.scales.template row<float>(page_[i]);
        for (int64_t token = 0; token < kPageTokens; ++token) to[i * kPageTokens + token] = scales[token] * factor;
      }
    };
    this->softmax(
        sums, [&](int64_t) { load_factors(scratch_.key_factor, problem_.scale * kLog2E); },
        [&](int64_t) {
          load_factors(scratch_.value_factor, 1.0f);
          // Scales of masked tokens may be NaN.
          const int64_t seen = std::clamp<int64_t>(task_.length - begin_, 0, kChunk);
          std::fill(scratch_.value_factor + seen, scratch_.value_factor + kChunk, 0.0f);
        });
    problem_.quantized() ? multiply_values<int8_t>(sums) : multiply_values<T>(sums);
  }

  int64_t number(int64_t i) const { return problem_.page(task_.sequence, task_.first_page + begin_ / kPageTokens + i); }
  template <class P>
  const P* rows(int64_t page) const {
    return problem_.k_pages.template row<P>(page);
  }
  // Spreads the prefetch of a page over `operands` steps; -1: prefetches nothing new.
  template <class P>
  LinePrefetch ahead(int64_t page, int64_t operands) const {
    const int64_t bytes = kPageTokens * dims_ * static_cast<int64_t>(sizeof(P));
    const P* const from = rows<P>(page < 0 ? page_[0] : page);
    return {reinterpret_cast<const char*>(from), page < 0 ? 0 : bytes / operands};
  }

  // Computes the scores of the chunk.
  template <class P>
  void multiply_keys() {
    for (int64_t i = 0; i < pages_; ++i) {
      const P* const page = rows<P>(page_[i]);
      for (int64_t half = 0; half < 2; ++half) {
        lanes_of_rows(page + half * 16 * dims_, dims_, scratch_.keys + half * 16 * dims_);
      }
      const int64_t first = first_row(i * kPageTokens), next = i + 1 < pages_ ? page_[i + 1] : -1;
      float* const s = scratch_.s + first * kScoreStride + i * kPageTokens;
      if constexpr (std::is_same_v<P, int8_t>) {
        // The scores of rotated keys first, in units of the scale of the latent.
        multiply_keys(first, latent_dims_, dims_, nullptr, s, ahead<P>(-1, 1));
        const float* const scales = problem_.scales.template row<float>(page_[i]);
        for (int64_t r = 0; r < head_rows_ - first; ++r) rescale(s + r * kScoreStride, scales);
        multiply_keys(first, 0, latent_dims_, s, s, ahead<P>(next, latent_dims_));
      } else {
        multiply_keys(first, 0, dims_, nullptr, s, ahead<P>(next, dims_));
      }
    }
  }
  static void rescale(float* s, const float* scales) {
    for (int64_t i = 0; i < kPageTokens; i += kLanes) {
      const Vec of_latent = load(scales + i), of_rope = load(scales + kPageTokens + i);
      store(s + i, load(s + i) * (of_rope / of_latent));
    }
  }

  // s of a page, from row `first` on, = before (null: zero) + the products of dims `begin` to `end`.
  void multiply_keys(int64_t first, int64_t begin, int64_t end, const float* before, float* s, LinePrefetch next) {
    static constexpr float kNothing[kPageTokens] = {};
    const Left q = Left{scratch_.q + begin}.from(first);
    const A* const keys = scratch_.keys + begin * 16;
#ifdef TR_AMX
    if constexpr (std::is_same_v<T, bf16>) {
      return tile_scores(q, head_rows_ - first, keys, 16 * dims_, end - begin, before != nullptr, s, kScoreStride,
                         next);
    }
#endif
    LinePrefetch lines[] = {next, {next.at, 0}};
    product(q, head_rows_ - first, RightOperand<A>{keys, 2, (end - begin) / kPair<A>, 16 * dims_},
            {before ? before : kNothing, before ? kScoreStride : 0}, {s, kScoreStride}, lines);
  }

  // Adds the values of the chunk, for each row up to the last page that it attends to.
  template <class P>
  void multiply_values(const Sums& sums) {
    constexpr int64_t kStride = Scratch::kGroupStride;
    for (int64_t i = 0; i < pages_; ++i) {
      const int64_t tokens = std::min(task_.length - begin_ - i * kPageTokens, kPageTokens);
      lanes_of_dims(rows<P>(page_[i]), dims_, tokens, padded_, scratch_.values + i * 16 * kPageTokens, kStride);
    }
    for (int64_t i = 1; i <= pages_; ++i) {
      const int64_t first = first_row((i - 1) * kPageTokens);
      const int64_t end = i < pages_ ? first_row(i * kPageTokens) : head_rows_;
      if (first == end) continue;
      const Probabilities p = Probabilities{scratch_.p}.from(first);
      float* const o = sums.values + first * padded_;
      const int64_t operands = padded_ / 16 * i * kPageTokens / kPair<A>;
      const LinePrefetch next = ahead<P>(i == pages_ ? next_ : -1, operands);
#ifdef TR_AMX
      if constexpr (std::is_same_v<T, bf16>) {
        tile_values(p, end - first, scratch_.values, kStride, i, padded_, o, next);
        continue;
      }
#endif
      LinePrefetch lines[] = {next, {next.at, 0}};
      product(p, end - first, RightOperand<A>{scratch_.values, padded_ / 16, i * kPageTokens / kPair<A>, kStride},
              {o, padded_}, {o, padded_}, lines);
    }
  }

  const Tensor& q_rope_;
  const int64_t latent_dims_, dims_;  // of a latent, and of a row of the cache
  int64_t page_[kChunkPages];         // numbers of the chunk's pages
  int64_t next_ = -1;                 // the page that is read after them
};

TR_ENTRY(latent_attention, Team& team, const Tensor& q_latent, const Tensor& q_rope, const Tensor& cache_data,
         const Tensor& cache_scales, const Tensor& page_tables, const Tensor& seq_lens, const Tensor& query_starts,
         float scale, bool causal, const Tensor& lse, const Tensor& kv_starts, const Tensor& out) {
  int32_t heads[] = {0, static_cast<int32_t>(q_latent.size[1])};
  const Tensor one_head{heads, DType::i32, 2, {1, 2}, {2, 1}};  // of the cache, for all heads of q
  const LatentProblem problem{{"latent_attention", q_latent, cache_data, cache_data, cache_scales, page_tables,
                               seq_lens, query_starts, one_head, kv_starts, scale, causal, out, lse},
                              q_rope};
  check_batch(problem.kernel, q_latent.size[0], page_tables, seq_lens, query_starts, kv_starts, causal, {});
  for (int64_t i = 0; kv_starts && i < kv_starts.size[0]; ++i) {
    const int32_t first = kv_starts.as<int32_t>()[i];
    if (first % kPageTokens) {
      attention_error(problem.kernel, "kv_starts: expected a multiple of ", kPageTokens, " for sequence ", i, first);
    }
  }
  const auto token_cost = [](const Task& task) { return task.rows + 8; };
  for_float(q_latent.dtype, [&](auto type) {
    run_spans<LatentTask<decltype(type)>>(problem, {kLatentTaskRows, kLatentPartTokens}, token_cost, team);
  });
}

}  // namespace tilerank::TR_RUNG
