// Constants, exp2 and the scratch memory of attention in vectors (included by attention_vector_task-inl.h; no
// include guard).
#include "simd/activations-inl.h"

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
