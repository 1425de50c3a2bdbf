// The body of attention with vector instructions, for the rung that includes this file after attention_task.h (no
// include guard, no own region).
//
// The cached tokens are walked in chunks of kChunk, with the usual online softmax:
//   s = q K^T scale;  m' = max(m, max s);  o = o e^(m - m') + e^(s - m') V;  l = l e^(m - m') + sum e^(s - m')
// What a row must not see (later tokens of its task, the rest of a page) enters as an exact zero.

namespace tilerank::TR_RUNG {

constexpr int64_t kChunk = 4 * kBlock;  // tokens between two updates of the running maximum
constexpr int64_t kRows = 32;           // rows of a task
constexpr int kParts = 16 / kLanes;

// Values that lie side by side in a page and are summed together: two bf16 or one float.
template <class T>
constexpr int64_t kPair = 4 / static_cast<int64_t>(sizeof(T));

struct Wide {  // 16 lanes
  Vec part[kParts];
};

// The left operands, q and the probabilities: as in the cache where the instruction wants bf16 pairs, else floats.
constexpr int kRegisterRows = kLanes == 16 ? 8 : 4, kRegisterSums = 2 * kRegisterRows;
#ifdef TR_BF16
template <class T>
using Left = T;
struct RightPairs {
  __m512bh v;
};
static inline RightPairs load_right(const bf16* b) { return {(__m512bh)_mm512_loadu_si512(b)}; }
static inline void multiply_add(Wide& sum, const bf16* a, const RightPairs& b) {
  int32_t pair;
  std::memcpy(&pair, a, 4);
  sum.part[0].v = _mm512_dpbf16_ps(sum.part[0].v, (__m512bh)_mm512_set1_epi32(pair), b.v);
}
#else
template <class T>
using Left = float;
struct RightPairs {
  Wide even, odd;
};
static inline RightPairs load_right(const bf16* b) {
  RightPairs right;
  for (int i = 0; i < kParts; ++i) {
    const Two pairs = load_pairs(b + 2 * kLanes * i);
    right.even.part[i] = pairs.a;
    right.odd.part[i] = pairs.b;
  }
  return right;
}
static inline void multiply_add(Wide& sum, const float* a, const RightPairs& b) {
  for (int i = 0; i < kParts; ++i) {
    sum.part[i] = fma(set(a[1]), b.odd.part[i], fma(set(a[0]), b.even.part[i], sum.part[i]));
  }
}
#endif
static inline Wide load_right(const float* b) {
  Wide right;
  for (int i = 0; i < kParts; ++i) right.part[i] = load(b + i * kLanes);
  return right;
}
static inline void multiply_add(Wide& sum, const float* a, const Wide& b) {
  for (int i = 0; i < kParts; ++i) sum.part[i] = fma(set(a[0]), b.part[i], sum.part[i]);
}

// c[r][16 lanes] += sum over steps of a[r][step] * b[step][16 lanes], a step being one pair, for G groups of lanes
template <int R, int G, class T>
static inline void product_block(const Left<T>* a, int64_t lda, const T* b, int64_t b_group, int64_t steps, float* c,
                                 int64_t ldc) {
  Wide sum[R][G];
  for (int r = 0; r < R; ++r) {
    for (int g = 0; g < G; ++g) {
      for (int i = 0; i < kParts; ++i) sum[r][g].part[i] = load(c + r * ldc + g * 16 + i * kLanes);
    }
  }
  for (int64_t step = 0; step < steps; ++step) {
    for (int g = 0; g < G; ++g) {
      const auto right = load_right(b + g * b_group + step * 16 * kPair<T>);
      for (int r = 0; r < R; ++r) multiply_add(sum[r][g], a + r * lda + step * kPair<T>, right);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int g = 0; g < G; ++g) {
      for (int i = 0; i < kParts; ++i) store(c + r * ldc + g * 16 + i * kLanes, sum[r][g].part[i]);
    }
  }
}

// Two groups at a time where the sums fit in registers: few rows alone would wait for each sum's own chain.
template <int R, class T>
static void product_rows(const Left<T>* a, int64_t lda, const T* b, int64_t b_group, int64_t groups, int64_t steps,
                         float* c, int64_t ldc) {
  int64_t g = 0;
  if constexpr (2 * R * kParts <= kRegisterSums) {
    for (; g + 2 <= groups; g += 2) {
      product_block<R, 2, T>(a, lda, b + g * b_group, b_group, steps, c + g * 16, ldc);
    }
  }
  for (; g < groups; ++g) product_block<R, 1, T>(a, lda, b + g * b_group, b_group, steps, c + g * 16, ldc);
}

template <class T>
static void product(const Left<T>* a, int64_t lda, int64_t rows, const T* b, int64_t b_group, int64_t groups,
                    int64_t steps, float* c, int64_t ldc) {
  int64_t r = 0;
  const auto blocks_of = [&](auto size) {
    for (; r + size <= rows; r += size) {
      product_rows<size, T>(a + r * lda, lda, b, b_group, groups, steps, c + r * ldc, ldc);
    }
  };
  blocks_of(std::integral_constant<int, kRegisterRows>{});
  blocks_of(std::integral_constant<int, 4>{});
  blocks_of(std::integral_constant<int, 2>{});
  blocks_of(std::integral_constant<int, 1>{});
}

template <class T>
struct VectorScratch {
  alignas(64) Left<T> q[kRows * kMaxDim];
  alignas(64) float s[kRows * kChunk];
  alignas(64) Left<T> p[kRows * kChunk];
  alignas(64) T keys[kMaxDim * kBlock], values[kChunk / kBlock][kMaxDim * kBlock];  // pages that need a change
  alignas(64) float key_factor[kChunk], value_factor[kChunk];
  // Of one part, and of all before and with it.
  alignas(64) float o[kRows * kMaxDim], all_o[kRows * kMaxDim];
  alignas(64) float sum[kRows * kLanes], all_sum[kRows * kLanes];  // lane by lane, added up at the end
  float max[kRows], all_max[kRows];
};

// One row's scores of a chunk of `width` tokens, of which it sees `hidden` to `visible`, to probabilities times
// value_factor.
template <class L>
static void softmax_row(float* s, L* p, int64_t hidden, int64_t visible, int64_t width, const float* key_factor,
                        const float* value_factor, float& max_so_far, float* sum, float* o, int64_t d) {
  if (visible <= 0) {
    for (int64_t i = 0; i < width; i += kLanes) store(p + i, zero());
    return;
  }
  for (int64_t i = 0; i < width; i += kLanes) store(s + i, load(s + i) * load(key_factor + i));
  const float nothing = -std::numeric_limits<float>::infinity();
  std::fill(s, s + std::max<int64_t>(hidden, 0), nothing);
  std::fill(s + std::min(visible, width), s + width, nothing);
  Vec largest = set(nothing);
  for (int64_t i = 0; i < width; i += kLanes) largest = max(largest, load(s + i));
  const float new_max = std::max(max_so_far, max_of(largest));
  const Vec decay = exp(set(max_so_far - new_max));
  Vec total = load(sum) * decay;
  for (int64_t i = 0; i < width; i += kLanes) {
    const Vec e = exp(load(s + i) - set(new_max));
    total = total + e;
    store(p + i, e * load(value_factor + i));
  }
  store(sum, total);
  if (new_max != max_so_far) {  // else the factor is exactly 1
    for (int64_t i = 0; i < d; i += kLanes) store(o + i, load(o + i) * decay);
  }
  max_so_far = new_max;
}

// The tokens hidden to n of a page of values, the others zero: memory beyond the sequence may hold NaN, and 0 * NaN is
// NaN.
template <class T>
static void cut_page(const T* page, int64_t hidden, int64_t n, int64_t d, T* copy) {
  constexpr int64_t x = kPair<T>;
  for (int64_t i = 0; i < d; i += 16) {
    for (int64_t token = 0; token < kBlock; ++token) {
      const int64_t at = i * kBlock + token / x * 16 * x + token % x;
      const bool kept = hidden <= token && token < n;
      for (int64_t lane = 0; lane < 16; ++lane) copy[at + lane * x] = kept ? page[at + lane * x] : T{};
    }
  }
}

// The codes of a page, which lie in the order of bf16 pages, as the numbers that they are.
static inline void widen_codes(const int8_t* codes, int64_t n, bf16* to) {
  for (int64_t i = 0; i < n; ++i) {
    const float code = codes[i];
    uint32_t bits;
    std::memcpy(&bits, &code, 4);
    to[i].bits = static_cast<uint16_t>(bits >> 16);
  }
}
static inline void widen_codes(const int8_t* codes, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += 32) {
    for (int64_t lane = 0; lane < 16; ++lane) {
      to[i + lane] = codes[i + 2 * lane];
      to[i + 16 + lane] = codes[i + 2 * lane + 1];
    }
  }
}

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
        task_(span.task),
        span_(span),
        parts_(parts) {}

  static bool joins(const Span&, const Span&) { return false; }

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
      const Vec of_all = exp(set(scratch_.all_max[r] - max)), of_part = exp(set(sums.max[r] - max));
      const auto add = [&](float* to, const float* from) { store(to, fma(load(from), of_part, load(to) * of_all)); };
      add(scratch_.all_sum + r * kLanes, sums.weights + r * kLanes);
      for (int64_t i = r * padded_; i < (r + 1) * padded_; i += kLanes) add(scratch_.all_o + i, sums.values + i);
      scratch_.all_max[r] = max;
    }
  }

  void store_rows() {
    for (int64_t r = 0; r < task_.rows; ++r) {
      const float of_row = sum(load(scratch_.all_sum + r * kLanes));
      if (problem_.lse) *task_.element<float>(problem_.lse, r) = scratch_.all_max[r] + std::log(of_row);
      const float* o = scratch_.all_o + r * padded_;
      T* out = task_.element<T>(problem_.out, r);
      for (int64_t i = 0; i < d_; i += kLanes) {
        const Vec value =
            load(o + i) / set(of_row) + zero();  // + 0: no negative zero, whatever zeros were added before
        if (d_ - i < kLanes) {
          store(out + i, value, d_ - i);
        } else {
          store(out + i, value);
        }
      }
    }
  }

 private:
  Sums all() { return {scratch_.all_o, scratch_.all_sum, scratch_.all_max}; }

  void load_queries() {
    // Zeros where keys are padded.
    std::memset(static_cast<void*>(scratch_.q), 0, sizeof(Left<T>) * static_cast<size_t>(task_.rows * kMaxDim));
    for (int64_t r = 0; r < task_.rows; ++r) {
      const T* from = task_.element<T>(problem_.q, r);
      Left<T>* to = scratch_.q + r * kMaxDim;
      for (int64_t i = 0; i < d_; i += kLanes) {
        if (d_ - i < kLanes) {
          store(to + i, load(from + i, d_ - i), d_ - i);
        } else {
          store(to + i, load(from + i));
        }
      }
    }
  }

  void attend(int64_t part, const Sums& sums) {
    const int64_t last = std::min(task_.seen(), (part + 1) * kPart);
    std::fill_n(sums.values, task_.rows * padded_, 0.0f);
    std::fill_n(sums.weights, task_.rows * kLanes, 0.0f);
    std::fill_n(sums.max, task_.rows, -std::numeric_limits<float>::infinity());
    for (int64_t begin = part * kPart; begin < last; begin += kChunk) {
      const int64_t pages = std::min(kChunk, last - begin + kBlock - 1) / kBlock, hidden = task_.hidden - begin;
      std::memset(scratch_.s, 0, sizeof(float) * static_cast<size_t>(task_.rows * kChunk));
      const T* values[kChunk / kBlock];
      for (int64_t i = 0; i < pages; ++i) {
        const T* const keys = look_up(begin, i, values);
        product<T>(scratch_.q, kMaxDim, task_.rows, keys, 16 * problem_.key_dims(), kBlock / 16,
                   problem_.key_dims() / kPair<T>, scratch_.s + i * kBlock, kChunk);
      }
      for (int64_t r = 0; r < task_.rows; ++r) {
        softmax_row(scratch_.s + r * kChunk, scratch_.p + r * kChunk, hidden, task_.visible(r) - begin, pages * kBlock,
                    scratch_.key_factor, scratch_.value_factor, sums.max[r], sums.weights + r * kLanes,
                    sums.values + r * padded_, padded_);
      }
      for (int64_t i = 0; i < pages; ++i) {
        product<T>(scratch_.p + i * kBlock, kChunk, task_.rows, values[i], 16 * kBlock, padded_ / 16, kBlock / kPair<T>,
                   sums.values, padded_);
      }
    }
  }

  // Keys, values and factors of page i of the chunk.
  const T* look_up(int64_t begin, int64_t i, const T** values) {
    const int64_t first = begin + i * kBlock, head = task_.kv_head;
    const int64_t page = problem_.page(task_.sequence, task_.first_page + first / kBlock);
    const int64_t hidden = std::max<int64_t>(task_.hidden - first, 0), seen = std::min(task_.length - first, kBlock);
    float* const key_factor = scratch_.key_factor + i * kBlock;
    float* const value_factor = scratch_.value_factor + i * kBlock;
    if (problem_.quantized()) {
      widen_codes(problem_.keys<int8_t>(page, head), problem_.key_dims() * kBlock, scratch_.keys);
      widen_codes(problem_.values<int8_t>(page, head), padded_ * kBlock, scratch_.values[i]);
      values[i] = scratch_.values[i];
      std::fill_n(value_factor, kBlock, 0.0f);
      std::copy(problem_.value_scales(page, head) + hidden, problem_.value_scales(page, head) + seen,
                value_factor + hidden);
      for (int64_t token = 0; token < kBlock; ++token) {
        key_factor[token] = problem_.key_scales(page, head)[token] * problem_.scale;
      }
      return scratch_.keys;
    }
    std::fill_n(key_factor, kBlock, problem_.scale);
    std::fill_n(value_factor, kBlock, 1.0f);
    values[i] = problem_.values<T>(page, head);
    if (hidden > 0 || seen < kBlock) {
      cut_page(values[i], hidden, seen, padded_, scratch_.values[i]);
      values[i] = scratch_.values[i];
    }
    return problem_.keys<T>(page, head);
  }

  const Problem& problem_;
  Scratch& scratch_;
  const int64_t d_, padded_;
  const Task& task_;
  const Span& span_;
  float* const parts_;
};

template <class T>
static void attention_by_vectors(const Args& args, Team& team) {
  const Problem problem = checked_problem(args, team);
  run_spans<VectorTask<T>>(args, problem, kRows, [](const Task& task) { return task.rows + 8; }, team);
}

}  // namespace tilerank::TR_RUNG
