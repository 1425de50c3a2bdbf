// sample: temperature, top-k, top-p and the inverse of the cumulative distribution, in double precision.
//
// Vectors look at the whole vocabulary; what has to be put in order is a few of its tokens. With top-k, those that
// reach the k-th largest of the maxima of small groups, which k tokens do at least. Without, masses are added up in
// classes of tokens about equally likely, and only the class in which the cumulative mass passes the wanted one is put
// in order.
#ifndef TR_RUNG
#include "core/entry.h"
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <vector>

#include "simd/float_order.h"
#include "rows/rows.h"

namespace tilerank {
namespace {

constexpr int64_t kNone = -1;  // for a row whose logits give no probabilities

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

constexpr int64_t kSpan = 512, kGroups = 16;  // logits 16 apart in a span are a group
constexpr int kClasses = 256;
constexpr double kClassesPerE = 16;  // classes in which probability falls by a factor of e; the last one has all beyond

// What each rung compiles for itself.
struct Passes {
  // The largest of each group, as ordered() has it, kGroups for each span; NaN if there is one, else 0.
  float (*largest_of_groups)(const float* x, int64_t n, int32_t* largest);
  // The class of each logit, and the sum of each class's e^((x - largest) * inverse_temperature).
  void (*masses)(const float* x, int64_t n, double largest, double inverse_temperature, uint8_t* classes, double* sums);
};

// One row of logits, whose maximum is finite.
class Row {
 public:
  Row(const float* x, int64_t n, float largest, double temperature)
      : x_(x), n_(n), largest_(static_cast<double>(largest)), inverse_temperature_(1 / temperature) {}

  // `groups`: the maxima of groups, of which the order is lost.
  void keep_top_k(size_t k, int32_t* groups, size_t count) {
    int32_t least = std::numeric_limits<int32_t>::min();
    std::vector<int32_t> of_spans(groups, groups + count);
    if (k <= count) {
      std::nth_element(groups, groups + k - 1, groups + count, std::greater<>());
      least = groups[k - 1];
    }
    for (size_t group = 0; group < count; group += kGroups) {
      const auto span = of_spans.begin() + static_cast<std::ptrdiff_t>(group);
      if (*std::max_element(span, span + kGroups) < least) continue;
      const int64_t begin = static_cast<int64_t>(group) / kGroups * kSpan;
      for (int64_t i = begin; i < std::min(begin + kSpan, n_); ++i) {
        if (ordered(x_[i]) >= least && x_[i] > -std::numeric_limits<float>::infinity()) add(i);
      }
    }
    if (k < members_.size()) tilerank::keep_top_k(members_, k);
    sums_.assign(1, 0.0);
    for (const Candidate& c : members_) sums_[0] += weight(c);
  }

  void add_up(const Passes& passes, uint8_t* classes) {
    classes_ = classes;
    sums_.resize(kClasses);
    passes.masses(x_, n_, largest_, inverse_temperature_, classes, sums_.data());
  }

  int64_t draw(double top_p, double uniform) {
    double total = 0;
    for (const double sum : sums_) total += sum;
    if (top_p == 1) return walk([&](double mass) { return mass > uniform * total; }).last.id;
    // As TopPLogitsWarper: a token stays while less than top_p lies before it, the first always.
    const Walk kept = walk([&](double mass) { return mass >= top_p * total; });
    const Walk drawn = walk([&](double mass) { return mass > uniform * kept.mass; });
    return comes_before(kept.last, drawn.last) ? kept.last.id : drawn.last.id;
  }

 private:
  struct Walk {
    Candidate last;
    double mass;  // up to it
  };

  // In order up to the first token where the mass has `passed`, or, where roundings keep it from that, the last one
  // that is possible. A class's sum and that of its members in order differ by roundings.
  template <class Passed>
  Walk walk(const Passed& passed) {
    Walk walk{{0.0f, -1}, 0.0};
    for (size_t i = 0; i < sums_.size(); ++i) {
      if (!passed(walk.mass + sums_[i])) {
        walk.mass += sums_[i];
        continue;
      }
      collect(i);
      Ordered in_order(members_);
      for (size_t member = 0; member < members_.size(); ++member) {
        const double w = weight(in_order[member]);
        if (w == 0) break;  // and so are all that follow: impossible
        walk = {in_order[member], walk.mass + w};
        if (passed(walk.mass)) return walk;
      }
    }
    return walk;
  }

  void collect(size_t wanted) {
    if (!classes_ || wanted == collected_) return;
    collected_ = wanted;
    members_.clear();
    constexpr int64_t kStep = 64;
    for (int64_t begin = 0; begin < n_; begin += kStep) {
      const int64_t end = std::min(begin + kStep, n_);
      int found = 0;
      for (int64_t i = begin; i < end; ++i) found |= classes_[i] == wanted;
      for (int64_t i = begin; found && i < end; ++i) {
        if (classes_[i] == wanted) add(i);
      }
    }
  }

  void add(int64_t i) { members_.push_back({x_[i], static_cast<int32_t>(i)}); }
  double weight(const Candidate& c) const {
    return std::exp((static_cast<double>(c.logit) - largest_) * inverse_temperature_);
  }

  const float* const x_;
  const int64_t n_;
  const double largest_, inverse_temperature_;
  const uint8_t* classes_ = nullptr;  // without them all members are one class
  size_t collected_ = kClasses;       // the class that members_ has
  std::vector<double> sums_;
  std::vector<Candidate> members_;
};

void sample_rows(const Tensor& logits, const Tensor& temperatures, const Tensor& top_ks, const Tensor& top_ps,
                 const Tensor& uniforms, const Tensor& out, Team& team, const Passes& passes) {
  const int64_t n = logits.size[1], groups = (n + kSpan - 1) / kSpan * kGroups;
  auto* const of_groups = static_cast<int32_t*>(team.scratch(static_cast<size_t>(groups * 4 + n)));
  auto* const classes = reinterpret_cast<uint8_t*>(of_groups + groups);
  const auto [first, last] = team.share(logits.size[0]);
  for (int64_t row = first; row < last; ++row) {
    const double temperature = *temperatures.row<float>(row), top_p = *top_ps.row<float>(row);
    const double uniform = *uniforms.row<float>(row);
    const int32_t top_k = *top_ks.row<int32_t>(row);
    if (!(temperature >= 0 && std::isfinite(temperature))) {
      fail("temperature: expected a finite number >= 0", temperature, row);
    }
    if (top_k < 0) fail("top_k: expected >= 0", top_k, row);
    if (!(top_p >= 0 && top_p <= 1)) fail("top_p: expected a number in [0, 1]", top_p, row);
    if (!(uniform >= 0 && uniform < 1)) fail("uniform: expected a number in [0, 1)", uniform, row);

    const float* x = logits.row<float>(row);
    int64_t& chosen = out.as<int64_t>()[row];
    chosen = kNone;
    if (std::isnan(passes.largest_of_groups(x, n, of_groups))) continue;
    const int32_t* const best = std::max_element(of_groups, of_groups + groups);
    int64_t i = (best - of_groups) / kGroups * kSpan;  // the first span that has the largest
    while (ordered(x[i]) != *best) ++i;
    if (std::isinf(x[i])) continue;
    if (temperature == 0) {
      chosen = i;
      continue;
    }
    Row values(x, n, x[i], temperature);
    if (top_k > 0) {
      values.keep_top_k(static_cast<size_t>(top_k), of_groups, static_cast<size_t>(groups));
    } else {
      values.add_up(passes, classes);
    }
    chosen = values.draw(top_p, uniform);
  }
}

}  // namespace
}  // namespace tilerank

#define TR_SOURCE "rows/sample.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

static float largest_of_groups(const float* x, int64_t n, int32_t* largest) {
  int32_t high[kGroups], low[kGroups];
  std::fill_n(high, kGroups, std::numeric_limits<int32_t>::min());
  std::fill_n(low, kGroups, std::numeric_limits<int32_t>::max());
  for (int64_t begin = 0; begin < n; begin += kSpan, largest += kGroups) {
    int32_t of_span[kGroups];
    std::fill_n(of_span, kGroups, std::numeric_limits<int32_t>::min());
    const auto look = [&](int64_t i, int64_t lane) {
      const int32_t value = ordered(x[i + lane]);
      of_span[lane] = std::max(of_span[lane], value);
      low[lane] = std::min(low[lane], value);
    };
    const int64_t end = std::min(begin + kSpan, n);
    int64_t i = begin;
    for (; i + kGroups <= end; i += kGroups) {
      for (int64_t lane = 0; lane < kGroups; ++lane) look(i, lane);
    }
    for (int64_t lane = 0; lane < end - i; ++lane) look(i, lane);
    for (int64_t lane = 0; lane < kGroups; ++lane) {
      largest[lane] = of_span[lane];
      high[lane] = std::max(high[lane], of_span[lane]);
    }
  }
  bool nan = false;
  for (int64_t lane = 0; lane < kGroups; ++lane) {
    nan |= high[lane] > ordered_infinity || low[lane] < ~ordered_infinity;
  }
  return nan ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
}

// e^y for y <= 0, within the last bits of double; 0 where a double has fewer of them.
static inline double exp_of_negative(double y) {
  constexpr double kShift = 0x1.8p52;  // a sum with it has the rounded number in its low bits
  const double clamped = std::max(y, -708.0), shifted = clamped * 0x1.71547652b82fep0 + kShift;
  const double whole = shifted - kShift;
  const double r = clamped - whole * 0x1.62e42fee00000p-1 - whole * 0x1.a39ef35793c76p-33;  // ln 2 in two parts
  double p = 1.0 / 479001600;
  for (const double c : {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120,
                         1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0}) {
    p = __builtin_fma(p, r, c);
  }
  int64_t bits;
  std::memcpy(&bits, &shifted, 8);
  bits = (bits + 1023) << 52;
  double power;
  std::memcpy(&power, &bits, 8);
  return y < -708.0 ? 0.0 : p * power;
}

static void masses(const float* x, int64_t n, double largest, double inverse_temperature, uint8_t* classes,
                   double* sums) {
  double weights[kSpan], turns[8][kClasses] = {};  // neighbours often are of one class
  for (int64_t begin = 0; begin < n; begin += kSpan) {
    const int64_t count = std::min(kSpan, n - begin);
    for (int64_t i = 0; i < count; ++i) {
      const double y = (static_cast<double>(x[begin + i]) - largest) * inverse_temperature;
      weights[i] = exp_of_negative(y);
      classes[begin + i] = static_cast<uint8_t>(static_cast<int32_t>(std::min(-y * kClassesPerE, kClasses - 1.0)));
    }
    for (int64_t i = 0; i < count; ++i) turns[i % 8][classes[begin + i]] += weights[i];
  }
  std::fill_n(sums, kClasses, 0.0);
  for (const auto& turn : turns) {
    for (int i = 0; i < kClasses; ++i) sums[i] += turn[i];
  }
}

TR_ENTRY(sample, Team& team, const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
         const Tensor& uniform, const Tensor& out) {
  sample_rows(logits, temperature, top_k, top_p, uniform, out, team, {largest_of_groups, masses});
}

}  // namespace tilerank::TR_RUNG
#endif
