// sample: temperature, top-k, top-p and the inverse of the cumulative distribution, in double precision.
#ifndef TR_RUNG
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

#include "rows.h"

namespace tilerank {
namespace {

constexpr const char* kLogits = "logits: expected a finite maximum and otherwise finite numbers or -inf";

struct Candidate {
  float logit;
  int32_t id;
};

// Descending probability, equal ones by id.
bool comes_before(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

[[noreturn]] void fail(const char* what, double found, int64_t row) {
  char number[32];
  std::snprintf(number, sizeof number, "%g", found);
  throw Error(std::string("sample: ") + what + ", found " + number + " in row " + std::to_string(row));
}

// The candidates in order, sorted no further than somebody looks: a peaked distribution needs a few of 150,000.
class Ordered {
 public:
  explicit Ordered(std::vector<Candidate>& all) : all_(all) {}
  const Candidate& operator[](size_t i) {
    while (i >= sorted_) {
      const auto begin = all_.begin() + static_cast<std::ptrdiff_t>(sorted_);
      const size_t more = std::min(all_.size() - sorted_, std::max<size_t>(256, 4 * sorted_));
      const auto end = begin + static_cast<std::ptrdiff_t>(more);
      if (end != all_.end()) std::nth_element(begin, end, all_.end(), comes_before);
      std::sort(begin, end, comes_before);
      sorted_ += more;
    }
    return all_[i];
  }

 private:
  std::vector<Candidate>& all_;
  size_t sorted_ = 0;
};

// As TopKLogitsWarper: everything as large as the k-th stays, ties included.
void keep_top_k(std::vector<Candidate>& all, size_t k) {
  const auto kth = all.begin() + static_cast<std::ptrdiff_t>(k - 1);
  std::nth_element(all.begin(), kth, all.end(), comes_before);
  const float smallest = kth->logit;
  all.erase(std::partition(kth, all.end(), [&](const Candidate& c) { return c.logit >= smallest; }), all.end());
}

int64_t draw(std::vector<Candidate>& all, float largest, double temperature, double top_p, double uniform) {
  const auto weight = [&](const Candidate& c) {
    return std::exp((static_cast<double>(c.logit) - static_cast<double>(largest)) / temperature);
  };
  double total = 0;
  for (const Candidate& c : all) total += weight(c);
  Ordered ordered(all);
  if (top_p < 1) {
    // As TopPLogitsWarper: a token stays while less than top_p lies before it, the first always.
    const double limit = top_p * total;
    size_t kept = 1;
    total = weight(ordered[0]);
    for (; kept < all.size() && total < limit; ++kept) total += weight(ordered[kept]);
    all.resize(kept);
  }
  const double target = uniform * total;
  double cumulative = 0;
  int64_t chosen = ordered[0].id;
  for (size_t i = 0; i < all.size(); ++i) {
    const double w = weight(ordered[i]);
    if (w == 0) break;  // and so are all that follow: impossible
    chosen = ordered[i].id;
    cumulative += w;
    if (cumulative > target) break;
  }
  return chosen;
}

// tensors: logits, temperature, top_k, top_p, uniform, out
void sample_rows(const Args& args, Team& team) {
  const Tensor &logits = args.tensor(0), &out = args.tensor(5);
  const int64_t n = logits.size[1];
  const auto number = [&](int tensor, int64_t row) -> double { return *args.tensor(tensor).row<float>(row); };
  std::vector<Candidate> all;
  const auto [first, last] = team.share(logits.size[0]);
  for (int64_t row = first; row < last; ++row) {
    const double temperature = number(1, row), top_p = number(3, row), uniform = number(4, row);
    const int32_t top_k = *args.tensor(2).row<int32_t>(row);
    if (!(temperature >= 0 && std::isfinite(temperature))) {
      fail("temperature: expected a finite number >= 0", temperature, row);
    }
    if (top_k < 0) fail("top_k: expected >= 0", top_k, row);
    if (!(top_p >= 0 && top_p <= 1)) fail("top_p: expected a number in [0, 1]", top_p, row);
    if (!(uniform >= 0 && uniform < 1)) fail("uniform: expected a number in [0, 1)", uniform, row);

    const float* x = logits.row<float>(row);
    int64_t best = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (std::isnan(x[i])) fail(kLogits, std::numeric_limits<double>::quiet_NaN(), row);
      if (x[i] > x[best]) best = i;
    }
    if (std::isinf(x[best])) fail(kLogits, x[best], row);
    int64_t& chosen = out.as<int64_t>()[row];
    if (temperature == 0) {
      chosen = best;
      continue;
    }
    all.clear();
    for (int64_t i = 0; i < n; ++i) {
      if (x[i] > -std::numeric_limits<float>::infinity()) all.push_back({x[i], static_cast<int32_t>(i)});
    }
    if (top_k > 0 && static_cast<size_t>(top_k) < all.size()) keep_top_k(all, static_cast<size_t>(top_k));
    chosen = draw(all, x[best], temperature, top_p, uniform);
  }
}

}  // namespace
}  // namespace tilerank

#define TR_SOURCE "sample.cpp"
#include "foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

// The same code on every rung: its time goes into exp and sort of the standard library.
static void sample(const Args& args, Team& team) { sample_rows(args, team); }
TR_KERNEL(sample)

}  // namespace tilerank::TR_RUNG
#endif
