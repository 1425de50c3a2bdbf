// sample: temperature, min-p, top-k, top-p and the inverse of the cumulative distribution, in double precision.
//
// Threads share pieces of rows. What decides are mostly the likeliest tokens of a row, or all that top-k leaves: these
// are its head, and of the others only the mass is computed. A flat row whose head has too little of it is read once
// more, and masses are added up in classes of tokens about equally likely. Only the class in which the cumulative mass
// passes the wanted one is looked at: it is halved about some token until few are left to be put in order.
#ifndef TR_RUNG
#include <cmath>
#include <cstdio>

#include "core/entry.h"
#include "logits/candidates.h"

namespace tilerank {
namespace {

constexpr int64_t kNone = -1;     // for a row whose logits give no probabilities
constexpr int64_t kUnknown = -2;  // as long as the head of a row does not decide
constexpr size_t kHead = 512;     // groups of which a head has tokens
constexpr int kClasses = 256;
constexpr double kClassesPerE = 16;  // classes in which probability falls by a factor of e; the last one has all beyond
constexpr std::ptrdiff_t kFew = 48;  // members that are sorted at once

struct ClassMember {
  Candidate token;
  double weight;
};

// What each rung compiles for itself.
struct SamplingPasses {
  void (*largest_of_groups)(const float* x, int64_t n, int32_t* largest);
  double (*sum_of_weights)(const float* x, int64_t n, const Weighing& weighing);
  // The class of each logit of a piece, and the sum of the weights of each class.
  void (*masses)(const float* x, int64_t n, const Weighing& weighing, uint8_t* classes, double* sums);
  void (*weigh)(ClassMember* members, int64_t n, const Weighing& weighing);
};

// The arguments of the kernel.
struct SampledRows {
  const Tensor &logits, &temperature, &top_k, &top_p, &min_p, &uniform, &out, &groups, &totals, &classes, &sums;

  int64_t width() const { return logits.size[1]; }
  int64_t pieces() const { return sums.size[1]; }
  Groups groups_of(int64_t row) const { return {groups.row<int32_t>(row), groups.size[1]}; }
  bool needs_total(int64_t row) const { return *temperature.row<float>(row) > 0 && *top_k.row<int32_t>(row) == 0; }
  Weighing weighing(int64_t row, float largest) const {
    const double heat = *temperature.row<float>(row), least = *min_p.row<float>(row);
    const float floor =
        least > 0 ? largest + static_cast<float>(heat * std::log(least)) : -std::numeric_limits<float>::infinity();
    return {largest, 1 / heat, floor};
  }
};

[[noreturn]] void fail(const char* what, double found, int64_t row) {
  char number[32];
  std::snprintf(number, sizeof number, "%g", found);
  throw Error(std::string("sample: ") + what + ", found " + number + " in row " + std::to_string(row));
}

void check_numbers(const SampledRows& rows) {
  for (int64_t row = 0; row < rows.logits.size[0]; ++row) {
    const float temperature = *rows.temperature.row<float>(row), top_p = *rows.top_p.row<float>(row);
    const float min_p = *rows.min_p.row<float>(row), uniform = *rows.uniform.row<float>(row);
    const int32_t top_k = *rows.top_k.row<int32_t>(row);
    if (!(temperature >= 0 && std::isfinite(temperature))) {
      fail("temperature: expected a finite number >= 0", temperature, row);
    }
    if (top_k < 0) fail("top_k: expected >= 0", top_k, row);
    if (!(top_p >= 0 && top_p <= 1)) fail("top_p: expected a number in [0, 1]", top_p, row);
    if (!(min_p >= 0 && min_p <= 1)) fail("min_p: expected a number in [0, 1]", min_p, row);
    if (!(uniform >= 0 && uniform < 1)) fail("uniform: expected a number in [0, 1)", uniform, row);
  }
}

// As TopKLogitsWarper: everything as large as the k-th stays, ties included.
void keep_top_k(std::vector<Candidate>& all, size_t k) {
  const auto kth = all.begin() + static_cast<std::ptrdiff_t>(k - 1);
  std::nth_element(all.begin(), kth, all.end(), comes_before);
  const float smallest = kth->logit;
  all.erase(std::partition(kth, all.end(), [&](const Candidate& c) { return c.logit >= smallest; }), all.end());
}

// The distribution of a row: tokens in classes, each of which comes before the next.
class Distribution {
 public:
  Distribution(const float* x, int64_t n, const Weighing& weighing, const SamplingPasses& passes)
      : x_(x), n_(n), weighing_(weighing), passes_(passes) {}

  // The head is a class, and all others are one whose tokens are not known. total: the weight of all tokens; 0 if there
  // are no others.
  void take(const std::vector<Candidate>& head, double total) {
    for (const Candidate& token : head) members_.push_back({token, 0.0});
    weigh();
    sums_.assign(2, 0.0);
    for (const ClassMember& member : members_) sums_[0] += member.weight;
    sums_[1] = std::max(total - sums_[0], 0.0);
    collected_ = 0;
  }

  // classes: of all logits. sums: of the weights of each class, for every piece.
  void take(const uint8_t* classes, const double* sums, int64_t pieces) {
    classes_ = classes;
    sums_.assign(kClasses, 0.0);
    for (int64_t piece = 0; piece < pieces; ++piece) {
      for (int i = 0; i < kClasses; ++i) sums_[static_cast<size_t>(i)] += sums[piece * kClasses + i];
    }
  }

  // Returns kUnknown if the token, or the last one that top-p leaves, is of the others.
  int64_t draw(double top_p, double uniform) {
    double total = 0;
    for (const double sum : sums_) total += sum;
    if (top_p == 1) return find([&](double mass) { return mass > uniform * total; }).last.id;
    // As TopPLogitsWarper: a token stays while less than top_p lies before it, the first always.
    const Place kept = find([&](double mass) { return mass >= top_p * total; });
    if (kept.last.id == kUnknown) return kUnknown;
    const Place drawn = find([&](double mass) { return mass > uniform * kept.mass; });
    return comes_before(kept.last, drawn.last) ? kept.last.id : drawn.last.id;
  }

 private:
  struct Place {
    Candidate last;
    double mass;  // up to it
  };

  // Returns the first token at which the mass has `passed`, or, where roundings keep it from that, the last one that is
  // possible. A class's sum and that of its members differ by roundings.
  template <class Passed>
  Place find(const Passed& passed) {
    Place place{{0.0f, -1}, 0.0};
    for (size_t i = 0; i < sums_.size(); ++i) {
      if (!passed(place.mass + sums_[i])) {
        place.mass += sums_[i];
        continue;
      }
      if (!classes_ && i > 0) return {{0.0f, kUnknown}, place.mass};
      collect(i);
      if (find_member(passed, place)) break;
    }
    return place;
  }

  // Moves `place` to the first of the members at which the mass has passed. Returns whether there is one.
  template <class Passed>
  bool find_member(const Passed& passed, Place& place) {
    auto first = members_.begin(), last = members_.end();
    while (last - first > kFew) {
      const Candidate pivot = median(first->token, (first + (last - first) / 2)->token, (last - 1)->token);
      const auto middle =
          std::partition(first, last, [&](const ClassMember& member) { return !comes_before(pivot, member.token); });
      double mass = place.mass;
      for (auto member = first; member != middle; ++member) mass += member->weight;
      if (passed(mass)) {
        last = middle;
      } else {
        place = {pivot, mass};
        first = middle;
      }
    }
    std::sort(first, last, [](const ClassMember& a, const ClassMember& b) { return comes_before(a.token, b.token); });
    for (; first != last; ++first) {
      place = {first->token, place.mass + first->weight};
      if (passed(place.mass)) return true;
    }
    return false;
  }

  static Candidate median(Candidate a, Candidate b, Candidate c) {
    if (comes_before(b, a)) std::swap(a, b);
    if (comes_before(c, b)) b = comes_before(c, a) ? a : c;
    return b;
  }

  // Makes the possible tokens of a class the members.
  void collect(size_t wanted) {
    if (wanted == collected_) return;
    collected_ = wanted;
    members_.clear();
    const auto value = static_cast<int>(wanted);
    const auto next = [&](int64_t i) {
      const auto* const at = static_cast<const uint8_t*>(std::memchr(classes_ + i, value, static_cast<size_t>(n_ - i)));
      return at ? at - classes_ : n_;
    };
    for (int64_t i = next(0); i < n_; i = next(i + 1)) members_.push_back({{x_[i], static_cast<int32_t>(i)}, 0.0});
    weigh();
  }

  void weigh() {
    passes_.weigh(members_.data(), static_cast<int64_t>(members_.size()), weighing_);
    std::erase_if(members_, [](const ClassMember& member) { return member.weight == 0; });
  }

  const float* const x_;
  const int64_t n_;
  const Weighing weighing_;
  const SamplingPasses& passes_;
  const uint8_t* classes_ = nullptr;  // null if there are the head and the others
  size_t collected_ = kClasses;       // the class that members_ has
  std::vector<double> sums_;
  std::vector<ClassMember> members_;
};

// Returns the token of a row, kNone, or kUnknown if its head does not decide.
int64_t sample_head(const SampledRows& rows, int64_t row, const SamplingPasses& passes) {
  const float* const x = rows.logits.row<float>(row);
  const Groups groups = rows.groups_of(row);
  const int32_t largest = groups.largest();
  if (!gives_probabilities(largest)) return kNone;
  const int64_t likeliest = groups.first_largest(x, largest);
  if (*rows.temperature.row<float>(row) == 0) return likeliest;
  const Weighing weighing = rows.weighing(row, x[likeliest]);
  const auto top_k = static_cast<size_t>(*rows.top_k.row<int32_t>(row));
  const int32_t least = std::max(ordered(weighing.floor), ~ordered_infinity + 1);
  std::vector<Candidate> head;
  groups.collect(x, rows.width(), top_k ? top_k : kHead, least, head);
  if (top_k && top_k < head.size()) keep_top_k(head, top_k);
  double total = 0;
  for (int64_t piece = 0; !top_k && piece < rows.pieces(); ++piece) total += rows.totals.row<double>(row)[piece];
  Distribution distribution(x, rows.width(), weighing, passes);
  distribution.take(head, total);
  return distribution.draw(*rows.top_p.row<float>(row), *rows.uniform.row<float>(row));
}

int64_t sample_classes(const SampledRows& rows, int64_t row, const SamplingPasses& passes) {
  const float largest = from_ordered(rows.groups_of(row).largest());
  Distribution distribution(rows.logits.row<float>(row), rows.width(), rows.weighing(row, largest), passes);
  distribution.take(rows.classes.row<uint8_t>(row), rows.sums.row<double>(row), rows.pieces());
  return distribution.draw(*rows.top_p.row<float>(row), *rows.uniform.row<float>(row));
}

void sample_rows(const SampledRows& rows, Team& team, const SamplingPasses& passes) {
  check_numbers(rows);
  const int64_t m = rows.logits.size[0], pieces = rows.pieces();
  int64_t* const out = rows.out.as<int64_t>();
  const auto [first_item, last_item] = team.share(m * pieces);
  const auto [first_row, last_row] = team.share(m);
  // Calls f(row, piece, x, n) for this thread's pieces of the wanted rows.
  const auto each_piece = [&, first = first_item, last = last_item](const auto& wanted, const auto& f) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t row = item / pieces, piece = item % pieces, begin = piece * kPiece;
      if (wanted(row)) f(row, piece, rows.logits.row<float>(row) + begin, std::min(kPiece, rows.width() - begin));
    }
  };
  int64_t known = -1;
  Weighing weighing{};
  bool probable = false;
  const auto weighs = [&](int64_t row) {  // whether a row has probabilities, which `weighing` makes
    if (row != known) {
      const int32_t largest = rows.groups_of(known = row).largest();
      probable = gives_probabilities(largest);
      if (probable) weighing = rows.weighing(row, from_ordered(largest));
    }
    return probable;
  };

  each_piece([](int64_t) { return true; },
             [&](int64_t row, int64_t piece, const float* x, int64_t n) {
               passes.largest_of_groups(x, n, rows.groups.row<int32_t>(row) + piece * (kPiece / kSpan * kGroups));
             });
  team.barrier();
  each_piece([&](int64_t row) { return rows.needs_total(row) && weighs(row); },
             [&](int64_t row, int64_t piece, const float* x, int64_t n) {
               rows.totals.row<double>(row)[piece] = passes.sum_of_weights(x, n, weighing);
             });
  team.barrier();
  for (int64_t row = first_row; row < last_row; ++row) out[row] = sample_head(rows, row, passes);
  team.barrier();
  if (std::find(out, out + m, kUnknown) == out + m) return;
  each_piece([&](int64_t row) { return out[row] == kUnknown && weighs(row); },
             [&](int64_t row, int64_t piece, const float* x, int64_t n) {
               passes.masses(x, n, weighing, rows.classes.row<uint8_t>(row) + piece * kPiece,
                             rows.sums.row<double>(row) + piece * kClasses);
             });
  team.barrier();
  for (int64_t row = first_row; row < last_row; ++row) {
    if (out[row] == kUnknown) out[row] = sample_classes(rows, row, passes);
  }
}

}  // namespace
}  // namespace tilerank

#define TR_SOURCE "logits/sample.cpp"
#include "simd/foreach_isa.h"
#else
#include "logits/passes-inl.h"

namespace tilerank::TR_RUNG {

// The weights and the classes of a span; both have room for kSpan.
static void weigh_span(const float* x, int64_t n, const Weighing& weighing, double* weights, int64_t* classes) {
  for_doubles(x, n, [&](int64_t i, Doubles logits) {
    const Doubles y = (logits - weighing.largest) * weighing.inverse_temperature;
    store(weights + i, weights_of(logits, weighing, y));
    store(classes + i, rounded(min(y * -kClassesPerE, all(kClasses - 1))));
  });
}

static void masses(const float* x, int64_t n, const Weighing& weighing, uint8_t* classes, double* sums) {
  double weights[kSpan], turns[8][kClasses] = {};  // neighbours often are of one class
  int64_t of_span[kSpan];
  for (int64_t begin = 0; begin < n; begin += kSpan) {
    const int64_t count = std::min(kSpan, n - begin);
    weigh_span(x + begin, count, weighing, weights, of_span);
    for (int64_t i = 0; i < count; ++i) {
      classes[begin + i] = static_cast<uint8_t>(of_span[i]);
      turns[i % 8][of_span[i]] += weights[i];
    }
  }
  std::fill_n(sums, kClasses, 0.0);
  for (const auto& turn : turns) {
    for (int i = 0; i < kClasses; ++i) sums[i] += turn[i];
  }
}

static void weigh(ClassMember* members, int64_t n, const Weighing& weighing) {
  float x[kSpan];
  double weights[kSpan];
  int64_t classes[kSpan];
  for (int64_t begin = 0; begin < n; begin += kSpan, members += kSpan) {
    const int64_t count = std::min(kSpan, n - begin);
    for (int64_t i = 0; i < count; ++i) x[i] = members[i].token.logit;
    weigh_span(x, count, weighing, weights, classes);
    for (int64_t i = 0; i < count; ++i) members[i].weight = weights[i];
  }
}

TR_ENTRY(sample, Team& team, const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
         const Tensor& min_p, const Tensor& uniform, const Tensor& out, const Tensor& groups, const Tensor& totals,
         const Tensor& classes, const Tensor& sums) {
  const SampledRows rows{logits, temperature, top_k, top_p, min_p, uniform, out, groups, totals, classes, sums};
  sample_rows(rows, team, {largest_of_groups, sum_of_weights, masses, weigh});
}

}  // namespace tilerank::TR_RUNG
#endif
