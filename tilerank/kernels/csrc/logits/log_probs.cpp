// log_probs: the log-probabilities of given tokens and of the likeliest ones, in double precision, rounded once.
//
// A piece of a row is read once: its groups' maxima, its own, the sum of e^(x - maximum), and how many of its logits
// are as large as the given token's. The pieces of a row are put together in order.
#ifndef TR_RUNG
#include <cmath>

#include "core/entry.h"
#include "logits/candidates.h"
#include "rows/rows.h"

namespace tilerank {
namespace {

// The arguments of the kernel.
struct ScoredRows {
  const Tensor &logits, &rows, &ids, &chosen, &ranks, &top_ids, &top, &groups, &sums, &at_least;

  int64_t width() const { return logits.size[1]; }
  const float* row(int64_t i) const { return logits.row<float>(*rows.row<int64_t>(i)); }
  Groups groups_of(int64_t i) const { return {groups.row<int32_t>(i), groups.size[1]}; }
};

// What each rung compiles for itself.
struct ScoringPasses {
  void (*largest_of_groups)(const float* x, int64_t n, int32_t* largest);
  double (*sum_of_weights)(const float* x, int64_t n, const Weighing& weighing);
  int64_t (*count_at_least)(const float* x, int64_t n, float least);
};

void read_piece(const ScoredRows& rows, const ScoringPasses& passes, int64_t i, int64_t piece) {
  const int64_t begin = piece * kPiece, n = std::min(kPiece, rows.width() - begin);
  const float* const x = rows.row(i);
  int32_t* const maxima = rows.groups.row<int32_t>(i) + begin / kSpan * kGroups;
  passes.largest_of_groups(x + begin, n, maxima);
  const int32_t largest = Groups{maxima, (n + kSpan - 1) / kSpan * kGroups}.largest();
  rows.at_least.row<int64_t>(i)[piece] = passes.count_at_least(x + begin, n, x[*rows.ids.row<int64_t>(i)]);
  // finish_row sees infinity and NaN in the maxima.
  const Weighing weighing{from_ordered(largest), 1.0, -std::numeric_limits<float>::infinity()};
  rows.sums.row<double>(i)[piece] = gives_probabilities(largest) ? passes.sum_of_weights(x + begin, n, weighing) : 0.0;
}

void finish_row(const ScoredRows& rows, int64_t i) {
  const float* const x = rows.row(i);
  const Groups groups = rows.groups_of(i);
  const int64_t count = rows.top.size[1];
  const int32_t largest = groups.largest();
  if (!gives_probabilities(largest)) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    rows.chosen.as<float>()[i] = nan;
    rows.ranks.as<int64_t>()[i] = 0;
    std::fill_n(rows.top_ids.row<int64_t>(i), count, 0);
    std::fill_n(rows.top.row<float>(i), count, nan);
    return;
  }
  const double shift = from_ordered(largest);
  constexpr int64_t kGroupsOfPiece = kPiece / kSpan * kGroups;
  double sum = 0;
  int64_t rank = 0;
  for (int64_t piece = 0; piece < rows.sums.size[1]; ++piece) {
    const int64_t begin = piece * kGroupsOfPiece, count = std::min(kGroupsOfPiece, groups.count - begin);
    const double own = from_ordered(Groups{groups.maxima + begin, count}.largest());
    const double part = rows.sums.row<double>(i)[piece];
    if (part > 0) sum += part * std::exp(own - shift);
    rank += rows.at_least.row<int64_t>(i)[piece];
  }
  const double log_sum = std::log(sum);
  const auto log_prob = [&](float logit) { return static_cast<float>(static_cast<double>(logit) - shift - log_sum); };
  rows.chosen.as<float>()[i] = log_prob(x[*rows.ids.row<int64_t>(i)]);
  rows.ranks.as<int64_t>()[i] = rank;

  std::vector<Candidate> likeliest;
  groups.collect(x, rows.width(), static_cast<size_t>(count), std::numeric_limits<int32_t>::min(), likeliest);
  std::partial_sort(likeliest.begin(), likeliest.begin() + count, likeliest.end(), comes_before);
  for (int64_t k = 0; k < count; ++k) {
    rows.top_ids.row<int64_t>(i)[k] = likeliest[static_cast<size_t>(k)].id;
    rows.top.row<float>(i)[k] = log_prob(likeliest[static_cast<size_t>(k)].logit);
  }
}

void log_probs_of_rows(const ScoredRows& rows, Team& team, const ScoringPasses& passes) {
  check_indices("log_probs: rows", rows.rows, rows.logits.size[0]);
  check_indices("log_probs: ids", rows.ids, rows.width());
  const int64_t count = rows.ids.size[0], pieces = rows.sums.size[1];
  const auto [first, last] = team.share(count * pieces);
  for (int64_t item = first; item < last; ++item) read_piece(rows, passes, item / pieces, item % pieces);
  team.barrier();
  const auto [first_row, last_row] = team.share(count);
  for (int64_t i = first_row; i < last_row; ++i) finish_row(rows, i);
}

}  // namespace
}  // namespace tilerank

#define TR_SOURCE "logits/log_probs.cpp"
#include "simd/foreach_isa.h"
#else
#include "logits/passes-inl.h"

namespace tilerank::TR_RUNG {

static int64_t count_at_least(const float* x, int64_t n, float least) {
  int32_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += x[i] >= least;
  return count;
}

TR_ENTRY(log_probs, Team& team, const Tensor& logits, const Tensor& rows, const Tensor& ids, const Tensor& chosen,
         const Tensor& ranks, const Tensor& top_ids, const Tensor& top, const Tensor& groups, const Tensor& sums,
         const Tensor& at_least) {
  log_probs_of_rows({logits, rows, ids, chosen, ranks, top_ids, top, groups, sums, at_least}, team,
                    {largest_of_groups, sum_of_weights, count_at_least});
}

}  // namespace tilerank::TR_RUNG
#endif
