// The body of attention, for the rung that includes this file (no include guard, no own region).
//
// A task is up to kRows rows of one sequence and one KV head; a row is a query head of a query token. It walks the
// cached tokens in chunks of kChunk, counted from the start of the sequence, with the usual online softmax:
//   s = q K^T scale;  m' = max(m, max s);  o = o e^(m - m') + e^(s - m') V;  l = l e^(m - m') + sum e^(s - m')
// A row's bits depend on nothing but the row and its keys: chunks are absolute, the sums of a row always run in the
// same order, and what a row must not see (later tokens of its task, the rest of a page) enters as an exact zero.
// Splitting one long sequence over threads would cut it at chunk edges and merge (m, l, o).

namespace tilerank::TR_RUNG {

constexpr int64_t kBlock = 32;          // tokens in a page
constexpr int64_t kChunk = 4 * kBlock;  // tokens between two updates of the running maximum
constexpr int64_t kRows = 32;           // rows of a task
constexpr int64_t kMaxDim = 256;
constexpr int kParts = 16 / kLanes;

// Values that lie side by side in a page and are summed together: two bf16 or one float.
template <class T>
constexpr int64_t kPair = 4 / static_cast<int64_t>(sizeof(T));

struct Wide {  // 16 lanes
  Vec part[kParts];
};

// The left operands, q and the probabilities: as in the cache where the instruction wants bf16 pairs, else floats.
#ifdef TR_AVX512
constexpr int kRegisterRows = 8, kRegisterSums = 16;
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
constexpr int kRegisterRows = 4, kRegisterSums = 8;
template <class T>
using Left = float;
struct RightPairs {
  Wide even, odd;
};
static inline RightPairs load_right(const bf16* b) {
  RightPairs right;
  for (int i = 0; i < kParts; ++i) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + 2 * kLanes * i));
    right.even.part[i].v = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    right.odd.part[i].v = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
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

struct Problem {
  const Tensor &q, &k_pages, &v_pages, &block_tables, &out, &lse;
  float scale;

  int64_t page(int64_t sequence, int64_t index) const {
    const int32_t page = block_tables.row<int32_t>(sequence)[index];
    if (page < 0 || page >= k_pages.size[0]) {
      throw Error("attention: block_tables: expected pages in [0, " + std::to_string(k_pages.size[0]) +
                  ") for sequence " + std::to_string(sequence) + ", found " + std::to_string(page));
    }
    return page;
  }
};

struct Task {
  int64_t sequence, length;      // length: cached tokens
  int64_t query, queries;        // the sequence's rows of q
  int64_t kv_head, head, heads;  // first query head and their number
  int64_t row, rows;             // this task's part of the queries * heads rows
  bool causal;                   // else every row sees all of the length

  int64_t tile_rows() const { return (rows + 15) / 16 * 16; }
  int64_t token(int64_t r) const { return (row + r) / heads; }
  int64_t visible(int64_t r) const { return causal ? length - queries + token(r) + 1 : length; }
  template <class T>
  T* element(const Tensor& t, int64_t r) const {
    return t.row<T>(query + token(r)) + (head + (row + r) % heads) * t.stride[1];
  }
};

template <class T>
struct Scratch {
  alignas(64) Left<T> q[kRows * kMaxDim];
  alignas(64) float s[kRows * kChunk];
  alignas(64) Left<T> p[kRows * kChunk];
  alignas(64) float o[kRows * kMaxDim];
  alignas(64) T tail[kMaxDim * kBlock];
  alignas(64) float sum[kRows * kLanes];  // lane by lane, added up at the end
  float max[kRows];
};

// One row's scores of a chunk of `width` tokens, of which it sees the first `visible`, to probabilities.
template <class L>
static void softmax_row(float* s, L* p, int64_t visible, int64_t width, Vec scale, float& max_so_far, float* sum,
                        float* o, int64_t d) {
  if (visible <= 0) {
    for (int64_t i = 0; i < width; i += kLanes) store(p + i, zero());
    return;
  }
  const Vec hidden = set(-std::numeric_limits<float>::infinity());
  Vec largest = hidden;
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t n = visible - i;
    if (n >= kLanes) {
      store(s + i, load(s + i) * scale);
    } else {
      const Vec seen = n > 0 ? load(s + i, n) * scale : hidden;
      store(s + i, hidden);
      if (n > 0) store(s + i, seen, n);
    }
    largest = max(largest, load(s + i));
  }
  const float new_max = std::max(max_so_far, max_of(largest));
  const Vec decay = exp(set(max_so_far - new_max));
  Vec total = load(sum) * decay;
  for (int64_t i = 0; i < width; i += kLanes) {
    const Vec e = exp(load(s + i) - set(new_max));
    total = total + e;
    store(p + i, e);
  }
  store(sum, total);
  if (new_max != max_so_far) {  // else the factor is exactly 1
    for (int64_t i = 0; i < d; i += kLanes) store(o + i, load(o + i) * decay);
  }
  max_so_far = new_max;
}

// The first `n` tokens of a page of values, the rest zero: memory past the sequence may hold NaN, and 0 * NaN is NaN.
template <class T>
static const T* cut_page(const T* page, int64_t n, int64_t d, T* copy) {
  constexpr int64_t x = kPair<T>;
  for (int64_t i = 0; i < d; i += 16) {
    for (int64_t token = 0; token < kBlock; ++token) {
      const int64_t at = i * kBlock + token / x * 16 * x + token % x;
      for (int64_t lane = 0; lane < 16; ++lane) copy[at + lane * x] = token < n ? page[at + lane * x] : T{};
    }
  }
  return copy;
}

template <class T>
static void load_queries(const Problem& problem, const Task& task, int64_t d, Left<T>* q) {
  // Zeros fill up the rows and the dims that tiles read beyond.
  std::memset(static_cast<void*>(q), 0, sizeof(Left<T>) * task.tile_rows() * kMaxDim);
  for (int64_t r = 0; r < task.rows; ++r) {
    const T* from = task.element<T>(problem.q, r);
    Left<T>* to = q + r * kMaxDim;
    for (int64_t i = 0; i < d; i += kLanes) {
      if (d - i < kLanes) {
        store(to + i, load(from + i, d - i), d - i);
      } else {
        store(to + i, load(from + i));
      }
    }
  }
}

template <class T>
static void store_rows(const Problem& problem, const Task& task, int64_t d, const Scratch<T>& scratch) {
  for (int64_t r = 0; r < task.rows; ++r) {
    const float total = sum(load(scratch.sum + r * kLanes));
    if (problem.lse) *task.element<float>(problem.lse, r) = scratch.max[r] + std::log(total);
    const Vec divisor = set(total == 0 ? 1.0f : total);  // a row that sees nothing is zero
    const float* o = scratch.o + r * kMaxDim;
    T* out = task.element<T>(problem.out, r);
    for (int64_t i = 0; i < d; i += kLanes) {
      const Vec value = load(o + i) / divisor + zero();  // + 0: no negative zero, whatever zeros were added before
      if (d - i < kLanes) {
        store(out + i, value, d - i);
      } else {
        store(out + i, value);
      }
    }
  }
}

template <class T>
static void attend(const Problem& problem, const Task& task, Scratch<T>& scratch) {
  const int64_t d = problem.q.size[2], padded = (d + 15) / 16 * 16;
  load_queries<T>(problem, task, d, scratch.q);
  std::memset(scratch.o, 0, sizeof(float) * task.tile_rows() * kMaxDim);
  std::memset(scratch.sum, 0, sizeof scratch.sum);
  std::fill_n(scratch.max, kRows, -std::numeric_limits<float>::infinity());
  const int64_t last = task.visible(task.rows - 1);
  for (int64_t begin = 0; begin < last; begin += kChunk) {
    const int64_t pages = std::min(kChunk, last - begin + kBlock - 1) / kBlock;
    const T* v_pages[kChunk / kBlock];
    std::memset(scratch.s, 0, sizeof(float) * task.tile_rows() * kChunk);
    for (int64_t i = 0; i < pages; ++i) {
      const int64_t first = begin + i * kBlock, page = problem.page(task.sequence, first / kBlock);
      const T* k_page = problem.k_pages.row<T>(page) + task.kv_head * problem.k_pages.stride[1];
      v_pages[i] = problem.v_pages.row<T>(page) + task.kv_head * problem.v_pages.stride[1];
      if (const int64_t n = task.length - first; n < kBlock) v_pages[i] = cut_page(v_pages[i], n, padded, scratch.tail);
      product<T>(scratch.q, kMaxDim, task.rows, k_page, 16 * d, kBlock / 16, d / kPair<T>, scratch.s + i * kBlock,
                 kChunk);
    }
    for (int64_t r = 0; r < task.rows; ++r) {
      softmax_row(scratch.s + r * kChunk, scratch.p + r * kChunk, task.visible(r) - begin, pages * kBlock,
                  set(problem.scale), scratch.max[r], scratch.sum + r * kLanes, scratch.o + r * kMaxDim, padded);
    }
    for (int64_t i = 0; i < pages; ++i) {
      product<T>(scratch.p + i * kBlock, kChunk, task.rows, v_pages[i], 16 * kBlock, padded / 16, kBlock / kPair<T>,
                 scratch.o, kMaxDim);
    }
  }
  store_rows<T>(problem, task, d, scratch);
}

// f(task) for every task of at most `max_rows` rows, in the order of the batch.
template <class F>
static void for_tasks(const Args& args, int64_t max_rows, F&& f) {
  const Tensor &seq_lens = args.tensor(4), &query_starts = args.tensor(5), &kv_map = args.tensor(6);
  for (int64_t sequence = 0; sequence < seq_lens.size[0]; ++sequence) {
    const int32_t* start = query_starts.as<int32_t>() + sequence;
    for (int64_t kv_head = 0; kv_head < kv_map.size[0]; ++kv_head) {
      const int32_t* heads = kv_map.row<int32_t>(kv_head);
      Task task{sequence, seq_lens.as<int32_t>()[sequence],
                start[0], start[1] - start[0],
                kv_head,  heads[0],
                heads[1], 0,
                0,        args.integer(0) != 0};
      const int64_t rows = task.queries * task.heads;
      for (; task.row < rows; task.row += max_rows) {
        task.rows = std::min(max_rows, rows - task.row);
        f(task);
      }
    }
  }
}

// tensors: q, k pages, v pages, block_tables, seq_lens, query_starts, kv_map, out, lse or none; ints: causal;
// floats: scale
static Problem checked_problem(const Args& args, Team& team) {
  const Tensor &q = args.tensor(0), &kv_map = args.tensor(6);
  const Problem problem{q,           args.tensor(1), args.tensor(2), args.tensor(3), args.tensor(7), args.tensor(8),
                        args.real(0)};
  check_batch(q, problem.block_tables, args.tensor(4), args.tensor(5), kv_map, args.integer(0) != 0);
  clear_unserved_heads(problem.out, problem.lse, kv_map, team);
  return problem;
}

template <class T>
static void attention_by_vectors(const Args& args, Team& team) {
  const Problem problem = checked_problem(args, team);
  Scratch<T> scratch;
  std::memset(static_cast<void*>(scratch.p), 0, sizeof scratch.p);
  const auto cost = [](const Task& task) { return (task.rows + 8) * (task.visible(task.rows - 1) + 1); };
  Deal deal;
  for_tasks(args, kRows, [&](const Task& task) { deal.total += cost(task); });
  for_tasks(args, kRows, [&](const Task& task) {
    if (deal.next_owner(cost(task), team.count) == team.index) attend<T>(problem, task, scratch);
  });
}

}  // namespace tilerank::TR_RUNG
