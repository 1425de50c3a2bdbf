// Constants, exp2, tanh and the scratch memory of attention in vectors (included by attention_vector_task-inl.h; no
// include guard).
namespace tilerank::TR_RUNG {

constexpr int64_t kChunk = 4 * kPageTokens;  // tokens between two updates of the running maximum
constexpr int64_t kChunkPages = kChunk / kPageTokens;
constexpr int64_t kVectorTaskRows = 96;  // rows of a task: a multiple of kSumRows
constexpr int64_t kAhead = 8 << 10;      // prefetch distance in bytes
constexpr int64_t kFewRows =
    2 * kSumRows;  // up to here pages are multiplied as stored; for more rows they are widened first
constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

#ifndef TR_AVX512
static inline float first_of(Vec x) { return _mm256_cvtss_f32(x.v); }
#endif

// 2^x within 2 units in the last place; 2^-inf = 0, NaN stays NaN.
#ifdef TR_AVX512
static inline Vec exp2(Vec x) {
  constexpr int kFromBelow = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  const Vec r = {_mm512_reduce_ps(x.v, kFromBelow)};
#else
static inline Vec exp2(Vec x) {
  // The operand order matters: the instruction returns its second operand if either is NaN.
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
  return {_mm512_scalef_ps(p.v, x.v)};  // scales by 2^floor(x)
#else
  return scale_by_power(p, n);
#endif
}

// tanh x within a few units in the last place, as x P(x^2) / Q(x^2) (the approximation of Eigen); NaN stays NaN.
static inline Vec tanh(Vec x) {
  x = min(set(7.90531111f), max(set(-7.90531111f), x));
  const Vec y = x * x;
  Vec p = set(-2.76076847742355e-16f);
  p = fma(p, y, set(2.00018790482477e-13f));
  p = fma(p, y, set(-8.60467152213735e-11f));
  p = fma(p, y, set(5.12229709037114e-08f));
  p = fma(p, y, set(1.48572235717979e-05f));
  p = fma(p, y, set(6.37261928875436e-04f));
  p = fma(p, y, set(4.89352455891786e-03f));
  Vec q = set(1.19825839466702e-06f);
  q = fma(q, y, set(1.18534705686654e-04f));
  q = fma(q, y, set(2.26843463243900e-03f));
  q = fma(q, y, set(4.89352518554385e-03f));
  return x * p / q;
}

template <class T>
struct VectorScratch {
  using Value = T;
  using Left = LeftRows<LeftOperand<T>, kMaxDim>;
  using Probabilities = Left;
  static constexpr int64_t kRows = kVectorTaskRows, kRowStep = kSumRows, kScoreStride = kChunk + 16;
  alignas(64) LeftOperand<T> q[kRows * Left::kStride];
  alignas(64) float s[kRows * kScoreStride];
  alignas(64) LeftOperand<T> p[kRows * Left::kStride];
  alignas(64) LeftOperand<T> panel[kMaxDim * kChunk];  // widened keys of a page, or values of a chunk
  alignas(64) T masked[kMaxDim * kPageTokens];         // the first or the last page of values, masked tokens zeroed
  alignas(64) float key_factor[kChunk], value_factor[kChunk];
  // Sums over one part, and merged sums over all parts so far.
  alignas(64) float o[kRows * kMaxDim], all_o[kRows * kMaxDim];
  alignas(64) float sum[kRows * kLanes], all_sum[kRows * kLanes];  // by lane; reduced at the end
  alignas(64) float max[kRows], all_max[kRows], new_max[kRows], decay[kRows];
  int64_t first[kRows], visible[kRows];  // the tokens [first, visible) that each row attends to
};

}  // namespace tilerank::TR_RUNG
