// The likeliest tokens of a row of logits, found without sorting the row.
//
// A row is cut into spans, and each span into groups of tokens. Vectors compute the maximum of every group. The k-th
// largest of these maxima is reached by at least k tokens, and by few more.
#pragma once
#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "core/kernel.h"
#include "simd/float_order.h"

namespace tilerank {

constexpr int64_t kSpan = 512, kGroups = 16;                   // logits 16 apart in a span are a group
constexpr int64_t kPiece = 16 * kSpan;                         // what a thread takes of a row at once
constexpr int32_t kNan = std::numeric_limits<int32_t>::max();  // the maximum of a group, if its piece has a NaN

struct Candidate {
  float logit;
  int32_t id;
};

// Descending logits, equal ones by id.
inline bool comes_before(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// How logits become weights: e^((x - largest) * inverse_temperature), 0 below the floor.
struct Weighing {
  double largest, inverse_temperature;
  float floor;
};

// Whether logits with this maximum have probabilities: not if there is NaN or infinity, or nothing but -infinity.
inline bool gives_probabilities(int32_t largest) { return largest < ordered_infinity && largest > ~ordered_infinity; }

// The maxima of the groups of a row, as ordered() maps them.
struct Groups {
  const int32_t* maxima;
  int64_t count;

  int32_t largest() const {
    int32_t largest = std::numeric_limits<int32_t>::min();
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, maxima[i]);
    return largest;
  }

  // The first index of the largest logit of x.
  int64_t first_largest(const float* x, int32_t largest) const {
    int64_t i = (std::find(maxima, maxima + count, largest) - maxima) / kGroups * kSpan;
    while (ordered(x[i]) != largest) ++i;
    return i;
  }

  // Sets `found` to logits of x[n] that are at least `least`, as ordered() maps it: all that are as large as the k-th
  // of these, and maybe smaller ones.
  void collect(const float* x, int64_t n, size_t k, int32_t least, std::vector<Candidate>& found) const {
    found.clear();
    if (k <= static_cast<size_t>(count)) {
      std::vector<int32_t> sorted(maxima, maxima + count);
      const auto kth = sorted.begin() + static_cast<std::ptrdiff_t>(k - 1);
      std::nth_element(sorted.begin(), kth, sorted.end(), std::greater<>());
      least = std::max(least, *kth);
    }
    for (int64_t group = 0; group < count; ++group) {
      if (maxima[group] < least) continue;
      const int64_t begin = group / kGroups * kSpan;
      for (int64_t i = begin + group % kGroups; i < std::min(begin + kSpan, n); i += kGroups) {
        if (ordered(x[i]) >= least) found.push_back({x[i], static_cast<int32_t>(i)});
      }
    }
  }
};

}  // namespace tilerank
