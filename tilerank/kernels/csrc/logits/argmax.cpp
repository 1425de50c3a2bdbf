// argmax: the index of the first of the largest elements.
#ifndef TR_RUNG
#include "core/entry.h"
#include "simd/float_order.h"
#define TR_SOURCE "logits/argmax.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

constexpr int64_t kPiece = 4096;

// Returns the largest element of a piece, as ordered() maps it.
static int32_t largest_of(const float* x, int64_t n, int64_t row) {
  int32_t largest = std::numeric_limits<int32_t>::min(), smallest = std::numeric_limits<int32_t>::max();
  for (int64_t i = 0; i < n; ++i) {
    largest = std::max(largest, ordered(x[i]));
    smallest = std::min(smallest, ordered(x[i]));
  }
  if (largest > ordered_infinity || smallest < ~ordered_infinity) {
    throw Error("argmax: logits: expected numbers, found NaN in row " + std::to_string(row));
  }
  return largest;
}

// largest: of every piece of a row. A vocabulary is wide and a batch may have one row, so threads share rows, in
// pieces.
TR_ENTRY(argmax, Team& team, const Tensor& logits, const Tensor& out, const Tensor& largest) {
  const int64_t n = logits.size[1], pieces = largest.size[1];
  const auto [first, last] = team.share(logits.size[0] * pieces);
  for (int64_t item = first; item < last; ++item) {
    const int64_t row = item / pieces, begin = item % pieces * kPiece;
    largest.as<int32_t>()[item] = largest_of(logits.row<float>(row) + begin, std::min(n - begin, kPiece), row);
  }
  team.barrier();
  const auto [first_row, last_row] = team.share(logits.size[0]);
  for (int64_t row = first_row; row < last_row; ++row) {
    const int32_t* const of_row = largest.row<int32_t>(row);
    const int32_t* const best = std::max_element(of_row, of_row + pieces);
    int64_t i = (best - of_row) * kPiece;
    while (ordered(logits.row<float>(row)[i]) != *best) ++i;
    out.as<int64_t>()[row] = i;
  }
}

}  // namespace tilerank::TR_RUNG
#endif
