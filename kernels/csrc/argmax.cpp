// argmax: the first of the largest.
#ifndef TR_RUNG
#include "rows.h"
#define TR_SOURCE "argmax.cpp"
#include "foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

// Floats as integers of the same order (both zeros alike): integer maxima are associative, so the compiler can
// vectorise them. Every NaN of positive sign comes out above +inf, every other one below -inf.
static inline int32_t ordered(float x) {
  int32_t bits;
  x += 0.0f;
  std::memcpy(&bits, &x, 4);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

// tensors: logits, out
static void argmax(const Args& args, Team& team) {
  const Tensor &logits = args.tensor(0), &out = args.tensor(1);
  const int64_t n = logits.size[1];
  constexpr int64_t kPiece = 4096;
  constexpr int32_t kInfinity = 0x7f800000, kMinusInfinity = kInfinity ^ -1;
  const auto [first, last] = team.share(logits.size[0]);
  for (int64_t row = first; row < last; ++row) {
    const float* x = logits.row<float>(row);
    int32_t best = std::numeric_limits<int32_t>::min();
    int64_t piece = 0;
    for (int64_t begin = 0; begin < n; begin += kPiece) {
      int32_t largest = std::numeric_limits<int32_t>::min(), smallest = std::numeric_limits<int32_t>::max();
      for (int64_t i = begin; i < std::min(n, begin + kPiece); ++i) {
        largest = std::max(largest, ordered(x[i]));
        smallest = std::min(smallest, ordered(x[i]));
      }
      if (largest > kInfinity || smallest < kMinusInfinity) {
        throw Error("argmax: logits: expected numbers, found NaN in row " + std::to_string(row));
      }
      if (largest > best) {
        best = largest;
        piece = begin;
      }
    }
    while (ordered(x[piece]) != best) ++piece;
    out.as<int64_t>()[row] = piece;
  }
}
TR_KERNEL(argmax)

}  // namespace tilerank::TR_RUNG
#endif
