// The arithmetic of attention on one group of rows in AMX tiles (included by attention_amx.cpp; no include guard).

namespace tilerank::TR_RUNG {

constexpr int64_t kGroup = 32;  // rows that are multiplied together
constexpr int64_t kTaskRows = 4 * kGroup;
constexpr int64_t kMostGroups = 32;
constexpr int64_t kChunksInFlight = 3;  // the one whose values are added, the current one, and the next
constexpr int64_t kTileChunkPages = 4;  // their probabilities are kept, for two chunks, until the values are added
constexpr int64_t kTileChunkTokens = kTileChunkPages * kPageTokens;
// Tokens that all groups process before the next ones. Long segments switch rarely between groups, whose sums and
// queries stay in L1; the keys and values of a segment should still be in L2 for the next group.
constexpr int64_t kSegment = 8 * kTileChunkTokens;
constexpr float kHeadroom = 16;  // a probability may reach 2^kHeadroom before its shift is raised
constexpr float kMostOfTwo =
    65535;  // of a sum of two probabilities; one alone may be slightly more, since exp2 is approximate
constexpr int64_t kTile = 16 * 32;                     // bf16 elements of a tile
constexpr int64_t kPageScores = kGroup * kPageTokens;  // scores of a group with a page

// The tokens [begin, end) that some rows of a group attend to, and [latest_begin, earliest_end) of all rows.
struct GroupTokens {
  int64_t begin, latest_begin, earliest_end, end;
};

struct TileScratch {
  // The scores of two pages, or of all rows of heads that are processed together: [token / 16][row][token % 16].
  alignas(64) float s[kTaskRows / kGroup][kPageScores];
  alignas(64) bf16 p[2 * kTileChunkPages * kPageScores];  // [page][row][32 tokens]
  alignas(64) bf16 q[kTaskRows * kMaxDim];                // [row / 16][dim / 32][row % 16][32]
  alignas(64) float o[kTaskRows * kMaxDim];               // over one part: [row / 32][dim / 16][row % 32][16]
  alignas(64) float all_o[kTaskRows * kMaxDim];           // over the first part and all that are merged into it
  alignas(64) float sum[(kTaskRows + kGroup) * 16];       // by lane, reduced at the end; one group is spare
  alignas(64) float zero_sums[kGroup * 16];               // the sums with which a part begins
  alignas(64) bf16 tile[2][kTile];                        // keys or values that must be padded, masked or widened
  alignas(64) bf16 masked[2][kMaxDim * kPageTokens];      // values of the first and the last page, masked
  alignas(64) bf16
      wide[kChunksInFlight * kTileChunkPages][2 * kMaxDim * kPageTokens];  // keys and values of chunks, widened codes
  alignas(64) float discarded[2 * kGroup * 16];                            // target of stores without a use
  float shift[kTaskRows];                        // an integer: probability = 2^(score - shift)
  int64_t first[kTaskRows], visible[kTaskRows];  // the tokens [first, visible) that each row attends to
  GroupTokens tokens[kMostGroups];
  alignas(64) float all_sum[kTaskRows * 16], all_shift[kTaskRows];
  float all_factor[kTaskRows], part_factor[kTaskRows];  // factors of the last merge
};

// A group of rows and a chunk of tokens that it processes.
struct GroupChunk {
  int64_t begin, group, pages;
  bool begins;  // whether it is the group's first one of its part
  const bf16 *k[kTileChunkPages], *v[kTileChunkPages];
  const float *key_scales[kTileChunkPages], *value_scales[kTileChunkPages];  // of int8 pages
  int buffer = 0;  // index of its widened codes in TileScratch::wide

  int64_t part() const { return begin / kPartTokens; }
  int64_t end() const { return begin + pages * kPageTokens; }  // of its pages
};

// 2^x within 4e-6, far below the rounding of the result to bf16; 2^-inf = 0.
struct PowerOfTwo {
  __m512 c4 = _mm512_set1_ps(0.01355575f), c3 = _mm512_set1_ps(0.05203237f), c2 = _mm512_set1_ps(0.24137976f),
         c1 = _mm512_set1_ps(0.69303212f), c0 = _mm512_set1_ps(1.0f);

  [[gnu::always_inline]] inline __m512 operator()(__m512 x) const {
    const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
    __m512 p = _mm512_fmadd_ps(r, c4, c3);
    p = _mm512_fmadd_ps(p, r, c2);
    p = _mm512_fmadd_ps(p, r, c1);
    p = _mm512_fmadd_ps(p, r, c0);
    return _mm512_scalef_ps(p, x);  // p 2^floor(x)
  }
  // Keeps the coefficients in registers; the compiler would reload constants for every row.
  [[gnu::always_inline]] inline void keep() { asm("" : "+v"(c4), "+v"(c3), "+v"(c2), "+v"(c1), "+v"(c0)); }
};
static inline Vec power_of_two(Vec x) { return {PowerOfTwo{}(x.v)}; }

// Returns the largest lane of each of 16 vectors.
static inline __m512 largest_of_each(__m512 (&x)[16]) {
  for (int i = 0; i < 8; ++i) {
    x[i] = _mm512_max_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(x[2 * i]), b = _mm512_castps_pd(x[2 * i + 1]);
    x[i] = _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  // From here, each quarter of a vector holds the maxima of four input vectors.
  for (int left = 2; left > 0; left /= 2) {
    for (int i = 0; i < left; ++i) {
      const __m512 a = x[2 * i], b = x[2 * i + 1];
      x[i] = _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
  }
  return x[0];
}

// Tokens begin to end of a page as a bit mask; both bounds are clamped to the page.
static inline uint32_t tokens_before(int64_t end) {
  return static_cast<uint32_t>((uint64_t{1} << std::clamp<int64_t>(end, 0, kPageTokens)) - 1);
}
static inline uint32_t tokens(int64_t begin, int64_t end) { return tokens_before(end) & ~tokens_before(begin); }
static inline __mmask16 lanes(uint32_t tokens, int half) { return static_cast<__mmask16>(tokens >> 16 * half); }

// A page as the rows of a group see it: row r attends to its tokens first[r] - begin to visible[r] - begin.
struct PageRows {
  const int64_t *first, *visible;
  int64_t begin;
  __m512 key_factor[2], value_factor[2];  // by token; those of keys are positive, so that -inf stays -inf

  // The exponents of 16 tokens; -inf for masked ones. Whole: no token is masked.
  template <bool Whole>
  __m512 exponents(const float* s, int64_t row, int half, float shift) const {
    __m512 scores = _mm512_load_ps(s + half * kGroup * 16);
    if constexpr (Whole) return _mm512_fmsub_ps(scores, key_factor[half], _mm512_set1_ps(shift));
    const __mmask16 seen = lanes(tokens(first[row] - begin, visible[row] - begin), half);
    scores = _mm512_fmsub_ps(scores, key_factor[half], _mm512_set1_ps(shift));
    return _mm512_mask_mov_ps(_mm512_set1_ps(-std::numeric_limits<float>::infinity()), seen, scores);
  }

  // Rounded as in RowWork, so that raising a shift depends on the row alone.
  template <bool Whole>
  float largest(const float* s, int64_t row, float shift) const {
    return _mm512_reduce_max_ps(larger<Whole>(s, row, shift));
  }
  // The largest exponent of each of 16 rows, without a shift.
  template <bool Whole>
  __m512 largest(const float* s, int64_t row) const {
    __m512 x[16];
    for (int i = 0; i < 16; ++i) x[i] = larger<Whole>(s + i * 16, row + i, 0.0f);
    return largest_of_each(x);
  }

 private:
  template <bool Whole>
  __m512 larger(const float* s, int64_t row, float shift) const {
    return _mm512_max_ps(exponents<Whole>(s, row, 0, shift), exponents<Whole>(s, row, 1, shift));
  }
};

// Turns the scores of a page into probabilities, row by row, and adds them to the sums. Masked tokens get probability
// zero. Whole: no token is masked. Quantized: the scales of the values are multiplied into the probabilities.
template <bool Whole, bool Quantized>
struct RowWork {
  PageRows page;
  int64_t row, rows;
  const float *s, *shift, *sum;
  float* new_sum;
  bf16* p;
  __m512 largest;  // largest sum of two probabilities so far
  PowerOfTwo power = {};

  int64_t left() const { return rows - row; }
  // Processes the next N rows; at least N must be left.
  template <int N>
  [[gnu::always_inline]] inline void run() {
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) next();
  }

  [[gnu::always_inline]] inline void finish() {
    while (row < rows) next();
  }

  [[gnu::always_inline]] inline void next() {
    const float* const from = s + row * 16;
    const __m512 x = page.template exponents<Whole>(from, row, 0, shift[row]);
    const __m512 y = page.template exponents<Whole>(from, row, 1, shift[row]);
    __m512 a = power(x), b = power(y);
    const __m512 both = _mm512_add_ps(a, b);
    largest = _mm512_max_ps(both, largest);  // this operand order ignores NaN
    _mm512_store_ps(new_sum + row * 16, _mm512_add_ps(_mm512_load_ps(sum + row * 16), both));
    if constexpr (Quantized) {
      a = _mm512_mul_ps(a, page.value_factor[0]);
      b = _mm512_mul_ps(b, page.value_factor[1]);
    }
    _mm512_store_si512(p + row * kPageTokens, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    ++row;
  }
};

// Tiles 0 to 3: sums of two row tiles x two lane groups; 4, 5: the row tiles; 6, 7: the lane groups.
template <int Groups, class F>
static inline void for_sums(F&& f) {
  f(std::integral_constant<int, 0>{}, std::integral_constant<int, 0>{});
  if constexpr (Groups > 1) f(std::integral_constant<int, 0>{}, std::integral_constant<int, 1>{});
  f(std::integral_constant<int, 1>{}, std::integral_constant<int, 0>{});
  if constexpr (Groups > 1) f(std::integral_constant<int, 1>{}, std::integral_constant<int, 1>{});
}

// One step of 32 summands: a and a2 are the row tiles, b and b2 the lane groups, [16][16][2]. Keys and values are
// loaded with a non-temporal hint: kept in L1, they would evict prefetched lines, since several pages fall into the
// same sets.
template <int Groups>
static inline void step(const bf16* a, const bf16* a2, const bf16* b, const bf16* b2, int64_t a_stride = 64) {
  tile_load_stream<6>(b, 64);
  tile_load<4>(a, a_stride);
  tile_load<5>(a2, a_stride);
  if constexpr (Groups > 1) tile_load_stream<7>(b2, 64);
  for_sums<Groups>([](auto row, auto group) { tile_dot_bf16<row * 2 + group, 4 + row, 6 + group>(); });
}

// 16 queries; row stride in bytes, stride of steps of 32 dims in elements.
struct QueryTile {
  const bf16* at;
  int64_t row_stride, step_stride;
};

// s = q k^T of one page
static inline void page_scores(const QueryTile& q, const QueryTile& q2, const bf16* k, int64_t d, float* s) {
  const int64_t steps = (d + 31) / 32, whole = d / 32;
  for_sums<2>([](auto row, auto group) { tile_zero<row * 2 + group>(); });
  for (int64_t i = 0; i < whole; ++i) {
    step<2>(q.at + i * q.step_stride, q2.at + i * q.step_stride, k + i * kTile, k + d * 16 + i * kTile, q.row_stride);
  }
  if (whole < steps) {
    // A tile takes 32 dims; the remaining ones come from a copy padded with zeros, since the page continues with other
    // data.
    alignas(64) bf16 rest[2][kTile] = {};
    for (int group = 0; group < 2; ++group) {
      std::memcpy(rest[group], k + group * d * 16 + whole * kTile, static_cast<size_t>(d % 32 * 16 * 2));
    }
    step<2>(q.at + whole * q.step_stride, q2.at + whole * q.step_stride, rest[0], rest[1], q.row_stride);
  }
  for_sums<2>([&](auto row, auto group) { tile_store<row * 2 + group>(s + (group * 2 + row) * 256, 64); });
}

// o += p v for one or two lane groups, over the pages of a chunk.
template <int Groups>
static inline void lane_values(const bf16* p, const GroupChunk& chunk, int64_t lane_group, float* o) {
  float* const sums = o + lane_group * kGroup * 16;
  const auto at = [&](auto row, auto group) { return sums + group * kGroup * 16 + row * 256; };
  if (chunk.begins) {
    for_sums<Groups>([](auto row, auto group) { tile_zero<row * 2 + group>(); });
  } else {
    for_sums<Groups>([&](auto row, auto group) { tile_load<row * 2 + group>(at(row, group), 64); });
  }
  for (int64_t page = 0; page < chunk.pages; ++page) {
    const bf16 *a = p + page * kPageScores, *v = chunk.v[page] + lane_group * 16 * kPageTokens;
    step<Groups>(a, a + kTile, v, v + 16 * kPageTokens);
  }
  for_sums<Groups>([&](auto row, auto group) { tile_store<row * 2 + group>(at(row, group), 64); });
}

}  // namespace tilerank::TR_RUNG
