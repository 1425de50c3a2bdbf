// The products of attention in vectors, compiled once per rung (no include guard). The left operand are rows of queries
// or probabilities. The right operand is a page as it is stored in the cache, or a panel: a page widened to the type of
// the left operand, in the layout of that type.

namespace tilerank::TR_RUNG {

constexpr int kParts = 16 / kLanes;

struct Wide {  // 16 lanes
  Vec part[kParts];
};

// The type of the left operands, queries and probabilities: that of the cache on rungs with products of bf16 pairs,
// else float.
#ifdef TR_BF16
template <class T>
using LeftOperand = T;
#else
template <class T>
using LeftOperand = float;
#endif

// Loads kLanes pairs of codes as floats: the first of each pair, then the second.
static inline Two load_pairs(const int8_t* p) {
#ifdef TR_AVX512
  // code + 128, unsigned, placed into the lowest mantissa bits of 2^23 (or one byte higher into 2^15), adds its value.
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const auto moved = [&](int code, float power) {
    constexpr int kAndThenXor = 0x6a;
    const __m512i base = _mm512_castps_si512(_mm512_set1_ps(power + 128));
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(words, _mm512_set1_epi32(code), base, kAndThenXor));
  };
  return {Vec{moved(0xff, 0x1p23f)} - set(0x1p23f + 128), Vec{moved(0xff00, 0x1p15f)} - set(0x1p15f + 128)};
#else
  const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {{_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 16), 16))},
          {_mm256_cvtepi32_ps(_mm256_srai_epi32(words, 16))}};
#endif
}

// 16 lanes of the right operand, and their product with a left operand.
template <class A, class B>
struct RightPairs {  // as pairs of floats
  void read(const B* b) {
    for (int i = 0; i < kParts; ++i) {
      const Two pairs = load_pairs(b + 2 * kLanes * i);
      even.part[i] = pairs.a;
      odd.part[i] = pairs.b;
    }
  }
  void multiply_add(Wide& sum, const float* a) const {
    for (int i = 0; i < kParts; ++i) {
      sum.part[i] = fma(set(a[1]), odd.part[i], fma(set(a[0]), even.part[i], sum.part[i]));
    }
  }

  Wide even, odd;
};
template <>
struct RightPairs<float, float> {
  void read(const float* b) {
    for (int i = 0; i < kParts; ++i) values.part[i] = load(b + i * kLanes);
  }
  void multiply_add(Wide& sum, const float* a) const {
    for (int i = 0; i < kParts; ++i) sum.part[i] = fma(set(a[0]), values.part[i], sum.part[i]);
  }

  Wide values;
};
#ifdef TR_BF16
template <>
struct RightPairs<bf16, bf16> {
  void read(const bf16* b) { pairs = (__m512bh)_mm512_loadu_si512(b); }
  void multiply_add(Wide& sum, const bf16* a) const {
    int32_t pair;
    std::memcpy(&pair, a, 4);
    sum.part[0].v = _mm512_dpbf16_ps(sum.part[0].v, (__m512bh)_mm512_set1_epi32(pair), pairs);
  }

  __m512bh pairs;
};

// The low and the high byte of the bf16 values 0 to 127, which bf16 represents exactly.
struct CodeBytes {
  alignas(64) uint8_t low[128], high[128];

  constexpr CodeBytes() : low(), high() {
    for (int code = 1; code < 128; ++code) {
      int power = 0;
      while (code >> (power + 1)) ++power;
      const int value = (127 + power) << 7 | (code << (7 - power) & 0x7f);
      low[code] = static_cast<uint8_t>(value);
      high[code] = static_cast<uint8_t>(value >> 8);
    }
  }
};
inline constexpr CodeBytes kCodeBytes;

// Widens 64 codes, none of them -128, to bf16: the first half, then the second.
static inline void widen_codes(const int8_t* b, __m512i (&words)[2]) {
  constexpr int kOrAnd = 0xf8;  // first | (second & third)
  // In the order that interleaving two registers restores.
  const __m512i codes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), _mm512_loadu_si512(b));
  const __m512i size = _mm512_abs_epi8(codes), sign = _mm512_set1_epi8(static_cast<char>(0x80));
  const uint8_t *const lows = kCodeBytes.low, *const highs = kCodeBytes.high;
  const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(lows), size, _mm512_load_si512(lows + 64));
  const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(highs), size, _mm512_load_si512(highs + 64));
  const __m512i with_sign = _mm512_ternarylogic_epi64(high, codes, sign, kOrAnd);
  words[0] = _mm512_unpacklo_epi8(low, with_sign);
  words[1] = _mm512_unpackhi_epi8(low, with_sign);
}
#endif

// Steps whose operands share a cache line; if two, a page has an even number of steps.
template <class A, class B>
constexpr int kStepsOfLine = std::is_same_v<A, bf16> && std::is_same_v<B, int8_t> ? 2 : 1;

template <class A, class B>
static inline void read_line(const B* b, RightPairs<A, B> (&operands)[1]) {
  operands[0].read(b);
}
#ifdef TR_BF16
static inline void read_line(const int8_t* b, RightPairs<bf16, bf16> (&operands)[2]) {
  __m512i words[2];
  widen_codes(b, words);
  for (int i = 0; i < 2; ++i) operands[i].pairs = (__m512bh)words[i];
}
#endif

// Lines to prefetch between the products: `at` advances by `step` bytes with every 16 lanes of the right operand. With
// step 0 the same line is prefetched again, which costs almost nothing. Lines `far` bytes behind `at` are prefetched
// into the second-level cache (core/cpu.h: far_ahead).
struct LinePrefetch {
  const char* at;
  int64_t step, far = 0;
};

// Right operands, [groups][steps][16 lanes]; a step is one pair.
template <class B>
struct RightOperand {
  const B* at;
  int64_t groups, steps, stride;  // stride between groups, in elements
};
template <class B>
RightOperand(const B*, int64_t, int64_t, int64_t) -> RightOperand<B>;  // clang before 17 deduces no aggregate

// Left rows of up to Dims values. They are an odd number of cache lines apart, so that a block of rows does not fall
// into a few sets of the cache. The distance is a constant, so that no row needs a register for its address.
template <class A, int64_t Dims>
struct LeftRows {
  static constexpr int64_t kStride = Dims + 64 / static_cast<int64_t>(sizeof(A));
  const A* at;

  LeftRows from(int64_t row) const { return {at + row * kStride}; }
};

// Rows of sums, `stride` apart.
template <class F>
struct SumRows {
  F* at;
  int64_t stride;

  F* row(int64_t r, int64_t group) const { return at + r * stride + group * 16; }
};

// A block of rows keeps its sums with some groups of lanes in registers. Each addition waits for the previous one, so a
// block of few rows takes more groups at a time.
constexpr int kSumRows = kLanes == 16 ? 12 : 6, kSumGroups = kLanes == 16 ? 2 : 1;
constexpr int kShortRows = 4, kShortGroups = kLanes == 16 ? 4 : 1;

// Calls f(0) to f(N - 1) with compile-time constants, so that the arrays they index stay in registers.
template <class F, int... I>
[[gnu::always_inline]] static inline void unroll(std::integer_sequence<int, I...>, const F& f) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
[[gnu::always_inline]] static inline void unroll(const F& f) {
  unroll(std::make_integer_sequence<int, N>{}, f);
}

// c[r][16 lanes] = before[r] + sum over steps of a[r][step] * b[step][16 lanes], for G groups.
template <int R, int G, class A, int64_t Dims, class B>
static void product_block(LeftRows<A, Dims> rows, const RightOperand<B>& b, int64_t group, SumRows<const float> before,
                          SumRows<float> c, LinePrefetch& ahead) {
  Wide sum[R * G];
  unroll<R * G * kParts>([&](auto i) {
    constexpr int kSum = i / kParts, kAt = i % kParts;
    sum[kSum].part[kAt] = load(before.row(kSum / G, group + kSum % G) + kAt * kLanes);
  });
  const B* right = b.at + group * b.stride;
  const B* const end = right + b.steps * 16 * kPair<B>;
  const int64_t stride = b.stride, ahead_step = ahead.step, far = ahead.far;
  const char* next = ahead.at;
  constexpr int kSteps = kStepsOfLine<A, B>;
  const A* a = rows.at;
  for (; right < end; right += kSteps * 16 * kPair<B>, a += kSteps * kPair<B>) {
    RightPairs<A, std::conditional_t<kSteps == 1, B, A>> operands[G][kSteps];
    unroll<G>([&](auto g) {
      read_line(right + g * stride, operands[g]);
      _mm_prefetch(next, _MM_HINT_T0);
      if constexpr (kLanes == 16 && R <= kRowsAhead) _mm_prefetch(next + far, _MM_HINT_T1);
      next += kSteps * ahead_step;
    });
    unroll<kSteps * R * G>([&](auto i) {
      constexpr int kStep = i / (R * G), kSum = i % (R * G);
      operands[kSum % G][kStep].multiply_add(sum[kSum], a + kStep * kPair<B> + kSum / G * rows.kStride);
    });
  }
  ahead.at = next;
  unroll<R * G * kParts>([&](auto i) {
    constexpr int kSum = i / kParts, kAt = i % kParts;
    store(c.row(kSum / G, group + kSum % G) + kAt * kLanes, sum[kSum].part[kAt]);
  });
}

// Each row's sum runs over the steps in order, for any number of rows. The first two blocks of rows prefetch, each its
// own lines.
template <int G, int kMostRows, class A, int64_t Dims, class B>
static void product_groups(LeftRows<A, Dims> a, int64_t rows, const RightOperand<B>& b, int64_t group,
                           SumRows<const float> before, SumRows<float> c, LinePrefetch (&ahead)[2]) {
  LinePrefetch idle{reinterpret_cast<const char*>(b.at), 0};
  int64_t r = 0, block = 0;
  const auto next_block = [&](auto size) {
    product_block<size, G>(a.from(r), b, group, {before.row(r, 0), before.stride}, {c.row(r, 0), c.stride},
                           block < 2 ? ahead[block] : idle);
    r += size;
    ++block;
  };
  const auto blocks_of = [&](auto size) {
    while (r + size <= rows) next_block(size);
  };
  if constexpr (kMostRows > 8) {
    // Blocks of about equal size: a small one takes almost as long as one of eight rows.
    const auto balanced = [&](auto size) {
      const auto wanted = [&] {
        const int64_t left = rows - r, count = (left + kMostRows - 1) / kMostRows;
        return left > 0 && (left + count - 1) / count == size;
      };
      while (wanted()) next_block(size);
    };
    balanced(std::integral_constant<int, 12>{});
    balanced(std::integral_constant<int, 11>{});
    balanced(std::integral_constant<int, 10>{});
    balanced(std::integral_constant<int, 9>{});
    blocks_of(std::integral_constant<int, 8>{});
  } else if constexpr (kMostRows > 4) {
    blocks_of(std::integral_constant<int, kMostRows>{});
  }
  blocks_of(std::integral_constant<int, 4>{});
  blocks_of(std::integral_constant<int, 2>{});
  blocks_of(std::integral_constant<int, 1>{});
}

// Whether to process a page group by group, in the order of memory: for few rows and operands that need no widening,
// which would take longer than reading.
template <class A, class B>
static bool in_order(int64_t rows) {
  return std::is_same_v<A, B> && rows <= kRowsInOrder;
}

template <class A, int64_t Dims, class B>
static void product(LeftRows<A, Dims> a, int64_t rows, const RightOperand<B>& b, SumRows<const float> before,
                    SumRows<float> c, LinePrefetch (&ahead)[2]) {
  int64_t g = 0;
  const auto groups_of = [&](auto size, auto most_rows) {
    for (; g + size <= b.groups; g += size) product_groups<size, most_rows>(a, rows, b, g, before, c, ahead);
  };
  constexpr std::integral_constant<int, kSumRows> any;
  if (!in_order<A, B>(rows)) {
    if (rows <= kShortRows) {
      groups_of(std::integral_constant<int, kShortGroups>{}, std::integral_constant<int, kShortRows>{});
    }
    groups_of(std::integral_constant<int, kSumGroups>{}, any);
  }
  groups_of(std::integral_constant<int, 1>{}, any);
}

// Widens values in pair order, or codes, to floats.
template <class From>
static inline void widen(const From* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += 32) {
    for (int64_t lane = 0; lane < 16; lane += kLanes) {
      const Two pairs = load_pairs(from + i + 2 * lane);
      store(to + i + lane, pairs.a);
      store(to + i + 16 + lane, pairs.b);
    }
  }
}
#ifdef TR_BF16
static inline void widen(const int8_t* from, int64_t n, bf16* to) {
  for (int64_t i = 0; i < n; i += 64) {
    __m512i words[2];
    widen_codes(from + i, words);
    for (int half = 0; half < 2; ++half) _mm512_store_si512(to + i + 32 * half, words[half]);
  }
}
#endif

// Copies a page of values with the tokens outside [first_token, n) zeroed: memory beyond the sequence may hold NaN, and
// 0 * NaN is NaN.
template <class T>
static void mask_page(const T* page, int64_t first_token, int64_t n, int64_t d, T* copy) {
  constexpr int64_t x = kPair<T>;
  const auto kept = [&](int64_t token) { return first_token <= token && token < n; };
  for (int64_t token = 0; token < kPageTokens; token += x) {
    const uint32_t first = x == 2 ? 0xffffu : ~0u, second = ~first;
    const uint32_t mask = (kept(token) ? first : 0) | (x == 2 && kept(token + 1) ? second : 0);
    for (int64_t i = 0; i < d; i += 16) {
      uint32_t words[16];
      std::memcpy(words, page + i * kPageTokens + token * 16, sizeof words);
      for (uint32_t& word : words) word &= mask;
      std::memcpy(copy + i * kPageTokens + token * 16, words, sizeof words);
    }
  }
}

}  // namespace tilerank::TR_RUNG
