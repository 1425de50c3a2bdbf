// edit_logits_: logit bias, penalties, masks of allowed tokens, and tokens that are left out if others remain.
//
// A text has few tokens that its logits are changed for, so a thread edits a row of them; masks are as wide as the
// vocabulary, so threads share their pieces. A masked logit is -infinity, whatever it was before.
#ifndef TR_RUNG
#include "core/entry.h"
#define TR_SOURCE "logits/edit_logits.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

constexpr float kExcluded = -std::numeric_limits<float>::infinity();
constexpr int64_t kMaskBytes = 1024;  // of a piece

static void check_ids(const char* name, const Tensor& ids, int64_t limit) {
  for (int64_t i = 0; i < ids.size[0]; ++i) {
    const int32_t id = ids.as<int32_t>()[i];
    if (id < 0 || id >= limit) {
      throw Error(std::string("edit_logits_: ") + name + ": expected values in [0, " + std::to_string(limit) +
                  "), found " + std::to_string(id));
    }
  }
}

// The elements of row `row`, of which `starts` [m + 1] has the first.
static Range range_of(const char* name, const Tensor& starts, int64_t row, int64_t limit) {
  const Range range{starts.as<int32_t>()[row], starts.as<int32_t>()[row + 1]};
  if (range.begin < 0 || range.begin > range.end || range.end > limit) {
    throw Error(std::string("edit_logits_: ") + name + ": expected ascending numbers from 0 to " +
                std::to_string(limit) + ", found " + std::to_string(range.begin) + " and " + std::to_string(range.end));
  }
  return range;
}

static void edit_row(float* x, const Range& range, const int32_t* ids, const Tensor& numbers) {
  for (int64_t i = range.begin; i < range.end; ++i) {
    const float* const of_id = numbers.row<float>(i);
    const float biased = x[ids[i]] + of_id[0], penalty = of_id[1];
    x[ids[i]] = (biased > 0 ? biased / penalty : biased * penalty) - of_id[2];
  }
}

// bits: of n tokens, the lowest first; 0 excludes a token.
static void mask_piece(float* x, int64_t n, const uint8_t* bits) {
  constexpr int64_t kWord = 64;
  for (int64_t begin = 0; begin < n; begin += kWord) {
    const int64_t count = std::min(kWord, n - begin);
    uint64_t word = 0;
    std::memcpy(&word, bits + begin / 8, static_cast<size_t>((count + 7) / 8));
    if (word == 0) {
      std::fill_n(x + begin, count, kExcluded);
    } else if (~word != 0) {
      for (int64_t i = 0; i < count; ++i) x[begin + i] = (word >> i) & 1 ? x[begin + i] : kExcluded;
    }
  }
}

static void leave_out(float* x, int64_t n, const int32_t* ids, int64_t count, float* kept) {
  for (int64_t i = 0; i < count; ++i) kept[i] = x[ids[i]];
  for (int64_t i = 0; i < count; ++i) x[ids[i]] = kExcluded;
  for (int64_t i = 0; i < n; ++i) {
    if (x[i] != kExcluded) return;
  }
  for (int64_t i = 0; i < count; ++i) x[ids[i]] = kept[i];
}

TR_ENTRY(edit_logits, Team& team, const Tensor& logits, const Tensor& starts, const Tensor& ids, const Tensor& numbers,
         const Tensor& mask_of, const Tensor& masks, const Tensor& banned_starts, const Tensor& banned) {
  const int64_t m = logits.size[0], n = logits.size[1];
  const auto [first, last] = team.share(m);
  check_ids("ids", ids, n);
  check_ids("banned", banned, n);
  for (int64_t row = first; row < last; ++row) {
    edit_row(logits.row<float>(row), range_of("starts", starts, row, ids.size[0]), ids.as<int32_t>(), numbers);
  }
  if (masks.size[0] > 0) {
    team.barrier();
    const int64_t pieces = (masks.size[1] + kMaskBytes - 1) / kMaskBytes;
    const auto [first_item, last_item] = team.share(m * pieces);
    for (int64_t item = first_item; item < last_item; ++item) {
      const int64_t row = item / pieces, byte = item % pieces * kMaskBytes, mask = mask_of.as<int32_t>()[row];
      if (mask < 0) continue;
      if (mask >= masks.size[0]) {
        throw Error("edit_logits_: mask_of: expected values below " + std::to_string(masks.size[0]) + ", found " +
                    std::to_string(mask));
      }
      mask_piece(logits.row<float>(row) + byte * 8, std::min(kMaskBytes * 8, n - byte * 8),
                 masks.row<uint8_t>(mask) + byte);
    }
    team.barrier();
  }
  auto* const kept = static_cast<float*>(team.scratch(static_cast<size_t>(std::max<int64_t>(banned.size[0], 1)) * 4));
  for (int64_t row = first; row < last; ++row) {
    const auto [begin, end] = range_of("banned_starts", banned_starts, row, banned.size[0]);
    if (begin < end) leave_out(logits.row<float>(row), n, banned.as<int32_t>() + begin, end - begin, kept);
  }
}

}  // namespace tilerank::TR_RUNG
#endif
