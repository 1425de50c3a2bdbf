// soft_cap: logits become cap * tanh(logit / cap).
#ifndef TR_RUNG
#include "core/entry.h"
#define TR_SOURCE "logits/soft_cap.cpp"
#include "simd/foreach_isa.h"
#else
#include "simd/activations-inl.h"

namespace tilerank::TR_RUNG {

// A vocabulary is wide and a batch may have one row, so threads share rows, in pieces.
TR_ENTRY(soft_cap, Team& team, const Tensor& logits, float cap) {
  constexpr int64_t kPiece = 4096;
  const int64_t n = logits.size[1], pieces = (n + kPiece - 1) / kPiece;
  const auto [first, last] = team.share(logits.size[0] * pieces);
  for (int64_t item = first; item < last; ++item) {
    const int64_t begin = item % pieces * kPiece;
    float* const x = logits.row<float>(item / pieces) + begin;
    for_lanes(std::min(n - begin, kPiece),
              [&](int64_t i, auto lanes) { lanes.store(x + i, set(cap) * tanh(lanes.load(x + i) / set(cap))); });
  }
}

}  // namespace tilerank::TR_RUNG
#endif
