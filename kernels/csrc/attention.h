// The body of attention with vector instructions, for the rung that includes this file after attention_task.h (no
// include guard, no own region).
//
// The cached tokens are walked in chunks of kChunk, with the usual online softmax, in powers of two:
//   s = q K^T scale log2(e);  m' = max(m, max s);  o = o 2^(m - m') + 2^(s - m') V;  l = l 2^(m - m') + sum 2^(s - m')
// What a row must not see (later tokens of its task, the rest of a page) enters as an exact zero.
//
// Heads that a thread has of the same sequence, where a token's query attends alone, are taken together, page by page:
// a page holds the keys of all heads and then their values, and what limits such tasks is reading them, which memory
// does faster in long runs.
#include "attention_product.h"

namespace tilerank::TR_RUNG {

constexpr int64_t kChunk = 4 * kBlock;  // tokens between two updates of the running maximum
constexpr int64_t kChunkPages = kChunk / kBlock;
constexpr int64_t kRows = 96;               // of a task: whole blocks of rows
constexpr int64_t kAhead = 8 << 10;         // bytes: requests 4 KiB ahead came late, 16 KiB gained nothing
constexpr int64_t kFewRows = 2 * kSumRows;  // that take pages as they are; for more it is worth it to widen them first
constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

// 2^x within 2 units in the last place; 2^-inf = 0, NaN stays NaN.
#ifdef TR_AVX512
static inline Vec exp2(Vec x) {
  constexpr int kFromBelow = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  const Vec r = {_mm512_reduce_ps(x.v, kFromBelow)};
#else
static inline Vec exp2(Vec x) {
  // The operand order matters: the instruction returns its second operand when either is NaN.
  x = min(set(129.0f), max(set(-200.0f), x));
  const Vec n = {_mm256_floor_ps(x.v)}, r = x - n;
#endif
  Vec p = set(0.00186713021f);
  p = fma(p, r, set(0.00901703002f));
  p = fma(p, r, set(0.0557999133f));
  p = fma(p, r, set(0.24016445f));
  p = fma(p, r, set(0.693151312f));
  p = fma(p, r, set(1.0f));
#ifdef TR_AVX512
  return {_mm512_scalef_ps(p.v, x.v)};  // which takes the next lower integer
#else
  return scale_by_power(p, n);
#endif
}

template <class T>
struct VectorScratch {
  static constexpr int64_t kScoreStride = kChunk + 16;
  alignas(64) Left<T> q[kRows * kLeftStride<Left<T>>];
  alignas(64) float s[kRows * kScoreStride];
  alignas(64) Left<T> p[kRows * kLeftStride<Left<T>>];
  alignas(64) Left<T> panel[kMaxDim * kChunk];  // widened keys of a page, or values of a chunk
  alignas(64) T cut[kMaxDim * kBlock];          // a first or a last page of values, without what nobody sees
  alignas(64) float key_factor[kChunk], value_factor[kChunk];
  // Of one part, and of all before and with it.
  alignas(64) float o[kRows * kMaxDim], all_o[kRows * kMaxDim];
  alignas(64) float sum[kRows * kLanes], all_sum[kRows * kLanes];  // lane by lane, added up at the end
  alignas(64) float max[kRows], all_max[kRows], new_max[kRows], decay[kRows];
  int64_t visible[kRows];
};

template <class T>
class VectorTask {
 public:
  using Scratch = VectorScratch<T>;

  // parts: where the sums go if the span does not begin its task.
  VectorTask(const Problem& problem, const Span& span, Scratch& scratch, float* parts)
      : problem_(problem),
        scratch_(scratch),
        d_(problem.dims()),
        padded_(problem.padded_dims()),
        span_(span),
        task_(span.all()),
        head_rows_(span.task.rows),
        parts_(parts),
        many_(head_rows_ > kFewRows),
        asks_(problem.quantized() || !in_order<Left<T>, T>(head_rows_) || !follows_streams()) {}

  static bool joins(const Span& span, const Span& next) {
    const int64_t rows = span.task.rows;
    return span.is_followed_by(next) && rows <= kFewRows && (span.heads + 1) * rows <= kRows;
  }

  void run() {
    if (task_.length == 0) {
      clear_rows<T>(problem_, task_);
      return;
    }
    load_queries();
    for (int64_t part = span_.begin; part < span_.end; ++part) {
      if (span_.begin > 0) {
        attend(part, sums_of_part(parts_, part - span_.begin, task_.rows, padded_));
      } else if (part == 0) {
        attend(part, all());
      } else {
        const Sums sums{scratch_.o, scratch_.sum, scratch_.max};
        attend(part, sums);
        merge(part, sums);
      }
    }
    if (span_.whole()) store_rows();
  }

  // Adds the sums over a part to those over all before it.
  void merge(int64_t, const Sums& sums) {
    for (int64_t r = 0; r < task_.rows; ++r) {
      const float max = std::max(scratch_.all_max[r], sums.max[r]);
      const Vec of_all = exp2(set(scratch_.all_max[r] - max)), of_part = exp2(set(sums.max[r] - max));
      const auto add = [&](float* to, const float* from) { store(to, fma(load(from), of_part, load(to) * of_all)); };
      add(scratch_.all_sum + r * kLanes, sums.weights + r * kLanes);
      for (int64_t i = r * padded_; i < (r + 1) * padded_; i += kLanes) add(scratch_.all_o + i, sums.values + i);
      scratch_.all_max[r] = max;
    }
  }

  void store_rows() {
    RowWalk row(task_);
    for (int64_t r = 0; r < task_.rows; ++r, row.next()) {
      const float of_row = sum(load(scratch_.all_sum + r * kLanes));
      if (problem_.lse) *row.template element<float>(problem_.lse) = scratch_.all_max[r] * kLn2 + std::log(of_row);
      const float* o = scratch_.all_o + r * padded_;
      T* out = row.template element<T>(problem_.out);
      for_lanes(d_, [&](int64_t i, auto lanes) {
        // + 0: no negative zero, whatever zeros were added before
        lanes.store(out + i, load(o + i) / set(of_row) + zero());
      });
    }
  }

 private:
  static constexpr int64_t kScoreStride = Scratch::kScoreStride, kStride = kLeftStride<Left<T>>;

  Sums all() { return {scratch_.all_o, scratch_.all_sum, scratch_.all_max}; }

  void load_queries() {
    RowWalk row(task_);
    for (int64_t r = 0; r < task_.rows; ++r, row.next()) {
      const T* from = row.template element<T>(problem_.q);
      Left<T>* to = scratch_.q + r * kStride;
      for_lanes(d_, [&](int64_t i, auto lanes) { store(to + i, lanes.load(from + i)); });
      scratch_.visible[r] = row.visible();
    }
  }

  void attend(int64_t part, const Sums& sums) {
    const int64_t last = std::min(task_.seen(), (part + 1) * kPart), end = std::min(task_.seen(), span_.end * kPart);
    std::fill_n(sums.values, task_.rows * padded_, 0.0f);
    std::fill_n(sums.weights, task_.rows * kLanes, 0.0f);
    std::fill_n(sums.max, task_.rows, -std::numeric_limits<float>::infinity());
    for (int64_t begin = part * kPart; begin < last; begin += kChunk) {
      begin_ = begin;
      pages_ = (std::min(kChunk, last - begin) + kBlock - 1) / kBlock;
      find_pages(begin + kChunk < end);
      for_pages([&](int64_t i, int64_t head) { multiply_keys(i, head); });
      softmax(sums);
      if (many_) {
        multiply_panel(sums);
      } else {
        for_pages([&](int64_t i, int64_t head) { multiply_values(sums, i, head); });
      }
    }
  }

  // In the order in which they lie in memory.
  template <class F>
  void for_pages(const F& f) const {
    for (int64_t i = 0; i < pages_; ++i) {
      for (int64_t head = 0; head < span_.heads; ++head) f(i, head);
    }
  }

  // Which pages the chunk has, and what is read after them.
  void find_pages(bool more) {
    const auto number = [&](int64_t i) {
      return problem_.page(task_.sequence, task_.first_page + begin_ / kBlock + i);
    };
    for (int64_t i = 0; i < pages_; ++i) page_[i] = number(i);
    next_ = more ? address(problem_.k_pages, number(kChunkPages), 0) : many_ ? nullptr : keys_of_next_task();
  }
  const char* keys_of_next_task() const {
    return problem_.quantized() ? reinterpret_cast<const char*>(problem_.keys_after<int8_t>(task_, span_.heads))
                                : reinterpret_cast<const char*>(problem_.keys_after<T>(task_, span_.heads));
  }
  const char* address(const Tensor& pages, int64_t page, int64_t head) const {
    return pages.as<char>() + (page * pages.stride[0] + (task_.kv_head + head) * pages.stride[1]) * element();
  }
  const char* keys(int64_t i, int64_t head) const { return address(problem_.k_pages, page_[i], head); }
  const char* values(int64_t i, int64_t head) const { return address(problem_.v_pages, page_[i], head); }
  int64_t element() const { return problem_.quantized() ? 1 : sizeof(T); }
  // A page for every right-hand operand that there is, or nothing.
  Ahead ahead(const char* page, int64_t values, int64_t operands) const {
    return page && asks_ ? Ahead{page, kBlock * values * element() / operands} : Ahead{keys(0, 0), 0};
  }
  // Few rows: what is read kAhead bytes or a little more after operand n of the chunk, keys of every page and head and
  // then values.
  const char* after(int64_t n) const {
    const int64_t all = pages_ * span_.heads, size = kBlock * padded_ * element();
    n += (kAhead + size - 1) / size;
    if (n < all) return keys(n / span_.heads, n % span_.heads);
    n -= all;
    if (n < all) return values(n / span_.heads, n % span_.heads);
    return next_ ? next_ + (n - all) * problem_.k_pages.stride[1] * element() : nullptr;
  }

  // Of a head's rows the first that sees token `first` of the chunk, or some before it: all before see nothing from
  // there on.
  int64_t first_row(int64_t first) const {
    int64_t r = 0;
    while (r + kSumRows < head_rows_ && scratch_.visible[r + kSumRows - 1] <= begin_ + first) r += kSumRows;
    return r;
  }

  template <class From>
  void widen_groups(const char* from, int64_t groups, int64_t size, Left<T>* to, int64_t stride) {
    for (int64_t g = 0; g < groups; ++g, to += stride) {
      const From* const group = reinterpret_cast<const From*>(from) + g * size;
      if constexpr (std::is_same_v<From, Left<T>>) {
        std::memcpy(static_cast<void*>(to), group, static_cast<size_t>(size) * sizeof(From));
      } else {
        widen(group, size, to);
      }
    }
  }
  // `groups` of 16 lanes of so many values in a page, as right-hand operands.
  void widen_page(const char* from, int64_t groups, int64_t values, Left<T>* to, int64_t stride) {
    if (problem_.quantized()) {
      widen_groups<int8_t>(from, groups, 16 * values, to, stride);
    } else {
      widen_groups<T>(from, groups, 16 * values, to, stride);
    }
  }

  void multiply_keys(int64_t i, int64_t head) {
    static constexpr float kNothing[kBlock] = {};
    const int64_t dims = problem_.key_dims(), skipped = first_row(i * kBlock), first = head * head_rows_ + skipped;
    const char* const from = keys(i, head);
    if (problem_.quantized()) problem_.fetch_scales(page_[i], task_.kv_head + head);  // of many at once some are lost
    const char* const next = !many_ ? after(i * span_.heads + head) : i + 1 < pages_ ? keys(i + 1, 0) : nullptr;
    const auto multiply = [&](const auto* keys) {
      constexpr int64_t x = kPair<std::remove_cvref_t<decltype(*keys)>>;
      const int64_t operands = kBlock / 16 * dims / x;
      Ahead lines[] = {ahead(next, dims, operands), ahead(many_ ? values(i, 0) : nullptr, padded_, operands)};
      product(scratch_.q + first * kStride, head_rows_ - skipped, Right{keys, kBlock / 16, dims / x, 16 * dims},
              {kNothing, 0}, {scratch_.s + first * kScoreStride + i * kBlock, kScoreStride}, lines);
    };
    if (!many_) {
      return problem_.quantized() ? multiply(reinterpret_cast<const int8_t*>(from))
                                  : multiply(reinterpret_cast<const T*>(from));
    }
    widen_page(from, kBlock / 16, dims, scratch_.panel, 16 * dims);
    multiply(static_cast<const Left<T>*>(scratch_.panel));
  }

  void load_key_factors(int64_t head) {
    const Vec scale = set(problem_.scale * kLog2E);
    for (int64_t i = 0; i < pages_; ++i) {
      const float* const from = problem_.key_scales(page_[i], task_.kv_head + head);
      float* const to = scratch_.key_factor + i * kBlock;
      for (int64_t token = 0; token < kBlock; token += kLanes) store(to + token, load(from + token) * scale);
    }
  }

  // Those of values that nobody sees may be NaN.
  void load_value_factors(int64_t head) {
    for (int64_t i = 0; i < pages_; ++i) {
      const int64_t start = begin_ + i * kBlock;
      const float* const from = problem_.value_scales(page_[i], task_.kv_head + head);
      float* const to = scratch_.value_factor + i * kBlock;
      std::copy_n(from, kBlock, to);
      std::fill_n(to, std::clamp<int64_t>(task_.hidden - start, 0, kBlock), 0.0f);
      const int64_t seen = std::clamp<int64_t>(task_.length - start, 0, kBlock);
      std::fill_n(to + seen, kBlock - seen, 0.0f);
    }
  }

  // Values of a page, without those that nobody sees: of the first and the last one, of codes none. Until the next
  // call.
  const char* seen_values(int64_t i, int64_t head) {
    const char* const page = values(i, head);
    if (problem_.quantized()) return page;
    const int64_t start = begin_ + i * kBlock, hidden = std::max<int64_t>(task_.hidden - start, 0);
    const int64_t seen = std::min(task_.length - start, kBlock);
    if (hidden == 0 && seen == kBlock) return page;
    cut_page(reinterpret_cast<const T*>(page), hidden, seen, padded_, scratch_.cut);
    return reinterpret_cast<const char*>(scratch_.cut);
  }

  // Few rows: as they lie in the cache.
  void multiply_values(const Sums& sums, int64_t i, int64_t head) {
    const int64_t skipped = first_row(i * kBlock), first = head * head_rows_ + skipped;
    float* const o = sums.values + first * padded_;
    const char* const from = seen_values(i, head);
    const auto multiply = [&](const auto* values) {
      constexpr int64_t x = kPair<std::remove_cvref_t<decltype(*values)>>;
      Ahead lines[] = {ahead(after((pages_ + i) * span_.heads + head), padded_, padded_ / 16 * kBlock / x),
                       ahead(nullptr, 0, 1)};
      product(scratch_.p + first * kStride + i * kBlock, head_rows_ - skipped,
              Right{values, padded_ / 16, kBlock / x, 16 * kBlock}, {o, padded_}, {o, padded_}, lines);
    };
    problem_.quantized() ? multiply(reinterpret_cast<const int8_t*>(from)) : multiply(reinterpret_cast<const T*>(from));
  }

  // Many rows: the chunk at once, in a panel; each row up to the last page that it sees.
  void multiply_panel(const Sums& sums) {
    constexpr int64_t x = kPair<Left<T>>;
    for (int64_t i = 0; i < pages_; ++i) {
      widen_page(seen_values(i, 0), padded_ / 16, kBlock, scratch_.panel + i * 16 * kBlock, 16 * kChunk);
    }
    for (int64_t i = 1; i <= pages_; ++i) {
      const int64_t first = first_row((i - 1) * kBlock), end = i < pages_ ? first_row(i * kBlock) : task_.rows;
      const int64_t operands = padded_ / 16 * i * kBlock / x;
      Ahead lines[] = {ahead(i == pages_ ? next_ : nullptr, problem_.key_dims(), operands), ahead(nullptr, 0, 1)};
      float* const o = sums.values + first * padded_;
      product(scratch_.p + first * kStride, end - first,
              Right<Left<T>>{scratch_.panel, padded_ / 16, i * kBlock / x, 16 * kChunk}, {o, padded_}, {o, padded_},
              lines);
    }
  }

  // Scores of the chunk to probabilities, and what was summed up so far to the new maxima.
  void softmax(const Sums& sums) {
    const int64_t hidden = std::max<int64_t>(task_.hidden - begin_, 0), width = pages_ * kBlock;
    const auto visible = [&](int64_t r) { return scratch_.visible[r] - begin_; };
    const Vec scale = set(problem_.scale * kLog2E);
    for (int64_t head = 0; head < span_.heads; ++head) {
      const auto find = [&](const auto& factor) {
        for_rows(head, [&](int64_t r) { find_max(r, hidden, visible(r), width, factor, sums.max[r]); });
      };
      if (problem_.quantized()) {
        load_key_factors(head);
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
      if (problem_.quantized()) load_value_factors(head);
      for_rows(head, [&](int64_t r) {
        if (visible(r) > 0) {
          weigh_row(r, width, sums);
        } else {
          for (int64_t i = 0; i < width; i += kLanes) store(scratch_.p + r * kStride + i, zero());
        }
      });
    }
  }

  template <class F>
  void for_rows(int64_t head, const F& f) const {
    for (int64_t r = head * head_rows_; r < (head + 1) * head_rows_; ++r) f(r);
  }

  // Scales the scores of a row; those of tokens that it does not see become -inf.
  template <class F>
  void find_max(int64_t r, int64_t hidden, int64_t visible, int64_t width, const F& factor, float max_so_far) {
    constexpr float nothing = -std::numeric_limits<float>::infinity();
    float* const s = scratch_.s + r * kScoreStride;
    scratch_.new_max[r] = max_so_far;
    if (visible <= 0) return;
    Vec largest = set(nothing);
    for (int64_t i = 0; i < width; i += kLanes) {
      const Vec x = load(s + i) * factor(i);
      store(s + i, x);
      largest = max(largest, x);
    }
    if (hidden > 0 || visible < width) {
      std::fill(s, s + hidden, nothing);
      std::fill(s + std::min(visible, width), s + width, nothing);
      largest = set(nothing);
      for (int64_t i = 0; i < width; i += kLanes) largest = max(largest, load(s + i));
    }
    scratch_.new_max[r] = std::max(max_so_far, max_of(largest));
  }

  void weigh_row(int64_t r, int64_t width, const Sums& sums) {
    const float* const s = scratch_.s + r * kScoreStride;
    Left<T>* const p = scratch_.p + r * kStride;
    const Vec max = set(scratch_.new_max[r]), decay = set(scratch_.decay[r]);
    Vec total = load(sums.weights + r * kLanes) * decay;
    for (int64_t i = 0; i < width; i += kLanes) {
      const Vec e = exp2(load(s + i) - max);
      total = total + e;
      store(p + i, e * load(scratch_.value_factor + i));
    }
    store(sums.weights + r * kLanes, total);
    if (scratch_.new_max[r] != sums.max[r]) {  // else the factor is exactly 1
      float* const o = sums.values + r * padded_;
      for (int64_t i = 0; i < padded_; i += kLanes) store(o + i, load(o + i) * decay);
    }
    sums.max[r] = scratch_.new_max[r];
  }

  const Problem& problem_;
  Scratch& scratch_;
  const int64_t d_, padded_;
  const Span& span_;
  const Task task_;  // of all heads
  const int64_t head_rows_;
  float* const parts_;
  const bool many_;  // rows of a head
  const bool asks_;  // for what is ahead
  // Of the chunk: its first token, its pages, and what is read after it.
  int64_t begin_ = 0, pages_ = 0, page_[kChunkPages];
  const char* next_ = nullptr;
};

template <class T>
static void attention_by_vectors(const Args& args, Team& team) {
  const Problem problem = checked_problem(args, team);
  run_spans<VectorTask<T>>(args, problem, kRows, [](const Task& task) { return task.rows + 8; }, team);
}

}  // namespace tilerank::TR_RUNG
