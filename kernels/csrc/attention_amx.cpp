// attention with both products of bf16 on tiles, for prefill and decode alike: a tile sums in another order than
// vdpbf16ps does, and a row must have the same bits in both.
//
// A task is up to kTaskRows rows of one sequence and KV head. A group of 32 rows (two by two tiles) takes a chunk of
// tokens page by page: scores, then probabilities. What the first-level cache has to hold stays small: the scores of
// two pages and the probabilities of a chunk. Then the chunk's values are added up. All groups walk one segment of
// tokens before the next, so that its keys and values come from memory once and stay in the second-level cache. The
// softmax lies between the products (attention_woven.h). Few rows (decode) read keys and values once, as a stream
// (attention_stream.h).
//
// The softmax does without the running maximum. Any shift of the exponents serves as long as nothing overflows, so a
// row keeps the one of its first page until a score exceeds it by kHeadroom. Shifts are whole powers of two: to change
// one is exact, and no row's bits depend on when it happens.
#ifndef TR_RUNG
#include <optional>
#include <type_traits>
#include <vector>

#include "attention_batch.h"
#include "cpu.h"
#define TR_ONLY_AMX
#define TR_SOURCE "attention_amx.cpp"
#include "foreach_isa.h"
#else
#include "amx.h"
#include "attention_task.h"
#include "attention.h"
#include "attention_tiles.h"
#include "attention_sums.h"

namespace tilerank::TR_RUNG {

// --- a task --------------------------------------------------------------------------------------------------------

// The tokens hidden to n of a page of values, the others zero: memory beyond the sequence may hold NaN, and 0 * NaN is
// NaN.
static void cut_values(const bf16* page, int64_t hidden, int64_t n, int64_t lane_groups, bf16* copy) {
  const auto keep = [&](int64_t token) { return hidden <= token && token < n; };
  for (int64_t group = 0; group < lane_groups; ++group) {
    for (int64_t pair = 0; pair < kBlock / 2; ++pair, page += 32, copy += 32) {
      const __mmask32 kept = (keep(2 * pair) ? 0x55555555u : 0u) | (keep(2 * pair + 1) ? 0xaaaaaaaau : 0u);
      _mm512_store_si512(copy, _mm512_maskz_loadu_epi16(kept, page));
    }
  }
}

// Codes as the numbers that they are; bf16 holds them exactly.
static inline __m512 widen_codes(const int8_t* codes) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))));
}
static void widen_page(const int8_t* codes, int64_t n, bf16* to) {
  for (int64_t i = 0; i < n; i += 32) {
    _mm512_store_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(widen_codes(codes + i + 16), widen_codes(codes + i)));
  }
}

class TileTask : public TileSums {
 public:
  using Scratch = TileScratch;

  TileTask(const Problem& problem, const Span& span, TileScratch& scratch, float* parts)
      : TileSums(problem, span, scratch, parts),
        key_dims_(problem.key_dims()),
        steps_((key_dims_ + 31) / 32),
        in_place_(by_heads_ && d_ % 32 == 0 && problem.scale >= 0) {}

 protected:
  // Few rows take few cycles.
  TileConfig tile_rows() const {
    TileConfig config;
    const int rows = static_cast<int>(std::min<int64_t>(task_.rows, 16));
    for (int tile = 0; tile < 8; ++tile) config.set(tile, tile < 6 ? rows : 16, 64);
    return config;
  }

  // Positive, so that -inf stays what it is; the sign went to q.
  float scale() const {
    return std::max(std::fabs(problem_.scale) * 1.44269504088896341f, std::numeric_limits<float>::min());
  }
  void look_up(Unit& unit, int64_t begin, int64_t group) {
    unit.begin = begin;
    unit.group = group;
    unit.pages = std::min(kUnitPages * kBlock, end_of(group) - begin + kBlock - 1) / kBlock;
    for (int64_t i = 0; i < unit.pages; ++i) {
      const int64_t first = begin + i * kBlock;
      const int64_t page = problem_.page(task_.sequence, task_.first_page + first / kBlock);
      unit.key_scales[i] = unit.value_scales[i] = nullptr;
      if (problem_.quantized()) {
        widen(unit, i, page);
        continue;
      }
      unit.k[i] = problem_.keys<bf16>(page, task_.kv_head);
      unit.v[i] = problem_.values<bf16>(page, task_.kv_head);
      const int64_t hidden = task_.hidden - first, n = task_.length - first;
      if (hidden > 0 || n < kBlock) {
        const int copy = hidden > 0 ? 0 : 1;
        if (!cut_[copy]) cut_values(unit.v[i], hidden, n, lane_groups_, scratch_.cut[copy]);
        cut_[copy] = true;
        unit.v[i] = scratch_.cut[copy];
      }
    }
  }

  void widen(Unit& unit, int64_t i, int64_t page) {
    bf16* const k = scratch_.wide[unit.buffer * kUnitPages + i];
    bf16* const v = k + kMaxDim * kBlock;
    widen_page(problem_.keys<int8_t>(page, task_.kv_head), key_dims_ * kBlock, k);
    widen_page(problem_.values<int8_t>(page, task_.kv_head), lane_groups_ * 16 * kBlock, v);
    unit.k[i] = k;
    unit.v[i] = v;
    unit.key_scales[i] = problem_.key_scales(page, task_.kv_head);
    unit.value_scales[i] = problem_.value_scales(page, task_.kv_head);
  }

  void look_up_first(Unit& unit) {
    int64_t group = 0;
    while (end_of(group) <= span_.begin * kPart) ++group;
    look_up(unit, span_.begin * kPart, group);
  }

  // All chunks of a segment for one group after the other, then the next segment.
  bool advance(const Unit& unit, Unit& next) {
    int64_t begin = unit.begin + kUnitPages * kBlock, group = unit.group;
    const auto skip_blind_groups = [&] {
      while (group < groups_ && end_of(group) <= begin) ++group;
    };
    if (begin % kSegment == 0 || begin >= end_of(group)) {
      begin = unit.begin / kSegment * kSegment;
      ++group;
      skip_blind_groups();
    }
    if (group == groups_) {
      begin += kSegment;
      group = 0;
      skip_blind_groups();
    }
    if (group == groups_) return false;
    look_up(next, begin, group);
    return true;
  }

  // All rows of a page. `weave(rows)` may do some of them between its own instructions; `settle` makes sure that `o`
  // has all that earlier units add to it.
  template <class Weave, class Settle>
  void softmax(const Unit& unit, int64_t page, const float* s, bf16* p, Weave&& weave, Settle&& settle) {
    const PageRows of_page = rows_of(unit, page);
    const int64_t begin = unit.begin + page * kBlock;
    const bool whole = of_page.hidden <= 0 && of_page.visible[0] >= begin + kBlock;
    const bool begins = begin % kPart == 0;
    if (begins) {
      whole ? set_shifts<true>(unit, of_page, s) : set_shifts<false>(unit, of_page, s);
    }
    const auto compute = [&](auto is_whole, auto is_quantized) {
      using Rows = RowWork<is_whole, is_quantized>;
      const int64_t first = unit.group * group_rows_;
      const auto rows_of_page = [&] {
        return Rows{of_page,
                    0,
                    rows_in(unit.group),
                    s,
                    scratch_.shift + first,
                    begins ? scratch_.no_sum : sums_[unit.group],
                    spare_sums_,
                    p + page * kPageScores,
                    _mm512_setzero_ps()};
      };
      Rows rows = rows_of_page();
      weave(rows);
      rows.finish();
      if (_mm512_cmp_ps_mask(rows.largest, _mm512_set1_ps(kMostOfTwo), _CMP_GT_OQ) != 0) {
        settle();
        move_shifts(unit, page, of_page, s, p);
        rows = rows_of_page();
        rows.finish();
      }
    };
    const auto with = [&](auto is_whole) {
      problem_.quantized() ? compute(is_whole, std::true_type{}) : compute(is_whole, std::false_type{});
    };
    whole ? with(std::true_type{}) : with(std::false_type{});
    std::swap(sums_[unit.group], spare_sums_);
  }

  PageRows rows_of(const Unit& unit, int64_t page) const {
    const int64_t begin = unit.begin + page * kBlock;
    PageRows of_page{scratch_.visible + unit.group * group_rows_, begin, task_.hidden - begin, {}, {}};
    for (int half = 0; half < 2; ++half) {
      of_page.key_factor[half] = _mm512_set1_ps(scale());
      if (!problem_.quantized()) continue;
      // Beyond the sequence a scale may be anything.
      const __mmask16 ours = lanes(tokens(of_page.hidden, task_.length - begin), half);
      const __m512 keys = _mm512_maskz_loadu_ps(ours, unit.key_scales[page] + 16 * half);
      of_page.key_factor[half] = _mm512_mul_ps(of_page.key_factor[half], keys);
      of_page.value_factor[half] = _mm512_maskz_loadu_ps(ours, unit.value_scales[page] + 16 * half);
    }
    return of_page;
  }

  // Sets the shift of every row to its largest score of the part's first page, if it sees something of it.
  template <bool Whole>
  void set_shifts(const Unit& unit, const PageRows& of_page, const float* scores) {
    const int64_t first = unit.group * group_rows_, rows = rows_in(unit.group);
    int64_t r = 0;
    for (; r + 16 <= rows; r += 16) {
      constexpr int kUp = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC;
      _mm512_storeu_ps(scratch_.shift + first + r,
                       _mm512_roundscale_ps(of_page.largest<Whole>(scores + r * 16, r), kUp));
    }
    for (; r < rows; ++r) {
      scratch_.shift[first + r] = std::ceil(of_page.largest<Whole>(scores + r * 16, r, 0.0f));
    }
  }

  // Moves the shift of every row of which a score exceeds it by more than kHeadroom to that score.
  void move_shifts(const Unit& unit, int64_t page, const PageRows& of_page, const float* scores, bf16* probabilities) {
    const int64_t first = unit.group * group_rows_, rows = rows_in(unit.group);
    for (int64_t r = 0; r < rows; ++r) {
      const float* s = scores + r * 16;
      float& shift = scratch_.shift[first + r];
      const float largest = of_page.largest<false>(s, r, shift);
      if (!(largest > kHeadroom)) continue;
      const float old = shift;
      shift += std::ceil(largest);
      const __m512 factor = power_of_two(_mm512_set1_ps(old - shift));
      float* sum = sums_[unit.group] + r * 16;
      _mm512_store_ps(sum, _mm512_mul_ps(_mm512_load_ps(sum), factor));
      for (int64_t i = 0; i < lane_groups_ && !begins_part(unit); ++i) {
        float* o = output(unit) + (i * group_rows_ + r) * 16;
        _mm512_store_ps(o, _mm512_mul_ps(_mm512_load_ps(o), factor));
      }
      for (int64_t before = 0; before < page; ++before) {
        bf16* p = probabilities + before * kPageScores + r * kBlock;
        for (int64_t i = 0; i < kBlock; i += 16) store(p + i, load(p + i) * Vec{factor});
      }
    }
  }

  void load_rows() {
    in_place_ ? find_rows() : pack_rows();
    for (int64_t group = 0; group < groups_; ++group) sums_[group] = scratch_.sum + group * group_rows_ * 16;
    spare_sums_ = scratch_.sum + kTaskRows * 16;
    std::fill_n(scratch_.no_sum, group_rows_ * 16, 0.0f);
  }

  // Tasks are short: this takes a few instructions for 16 rows.
  void find_rows() {
    const int64_t tokens = rows_ / task_.heads, step = task_.causal ? 1 : 0;
    for (int64_t head = 0; head < task_.heads; ++head) {
      const bf16* const of_head = task_.element<bf16>(problem_.q, head);
      int64_t* const visible = scratch_.visible + head * tokens;
      const int64_t first = task_.visible(0);
      for (int64_t i = 0; i < tokens; ++i) visible[i] = first + i * step;
      for (int64_t i = 0; i < tokens; i += 16) {
        rows_at_[(head * tokens + i) / 16] = of_head + i * problem_.q.stride[0];
      }
    }
  }

  void pack_rows() {
    // Rows that only fill up a tile hold anything: no row of a product depends on another.
    const __m512i sign = _mm512_set1_epi16(problem_.scale < 0 ? -0x8000 : 0);
    const int64_t tile_rows = std::min<int64_t>(group_rows_, 16);
    RowWalk walk(all_, by_heads_);
    for (int64_t r = 0; r < rows_; ++r, walk.next()) {
      scratch_.visible[r] = walk.visible();
      bf16* to = scratch_.q + (r / tile_rows * steps_ * tile_rows + r % tile_rows) * 32;
      const bf16* from = walk.element<bf16>(problem_.q);
      for (int64_t i = 0; i < steps_; ++i, to += tile_rows * 32) {
        const int64_t n = std::clamp<int64_t>(d_ - 32 * i, 0, 32);
        const __m512i row = _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), from + 32 * i);
        _mm512_store_si512(to, _mm512_xor_si512(row, sign));
      }
    }
  }

  // 16 rows of a group, as the left operand of the scores.
  QueryTile queries(int64_t group, int64_t half) const {
    const int64_t tile = 2 * group + half;
    if (!in_place_) return {scratch_.q + tile * steps_ * kTile, 64, kTile};
    return {rows_at_[tile], problem_.q.stride[0] * 2, 32};
  }

  const int64_t key_dims_, steps_;
  const bool in_place_;  // whether products take the queries where they are
  const bf16* rows_at_[kTaskRows / 16];
  bool cut_[2] = {};
};

#include "attention_woven.h"
#include "attention_stream.h"

class AnyTask : public WovenTask {
 public:
  AnyTask(const Problem& problem, const Span& span, TileScratch& scratch, float* parts)
      : WovenTask(problem, span, scratch, parts), stream_(problem, span, scratch, parts) {}
  void run() { task_.rows > kGroup ? WovenTask::run() : stream_.run(); }

  // Heads that are read in one walk.
  static bool joins(const Span& span, const Span& next) {
    return span.task.rows <= 16 && span.heads < kMostGroups &&
           span.heads < kTaskRows / kGroup * (kGroup / span.task.rows) && span.is_followed_by(next);
  }

 private:
  StreamTask stream_;
};

static void attention(const Args& args, Team& team) {
  if (args.tensor(0).dtype == DType::f32) {
    attention_by_vectors<float>(args, team);
    return;
  }
  // Few rows are bound by memory: reading a page costs about as much as four groups' arithmetic.
  const auto weight = [](const Task& task) { return (task.rows + kGroup - 1 + 4 * kGroup) / kGroup; };
  run_spans<AnyTask>(args, checked_problem(args, team), kTaskRows, weight, team);
  _mm_sfence();  // rows may have been stored past the caches
}
TR_KERNEL(attention)

}  // namespace tilerank::TR_RUNG
#endif
