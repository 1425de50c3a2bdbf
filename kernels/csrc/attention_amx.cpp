// attention with both products of bf16 on tiles, for prefill and decode alike: a tile sums in another order than
// vdpbf16ps does, and a row must have the same bits in both.
//
// A task is up to kTaskRows rows of one sequence and KV head. A group of 32 rows (two by two tiles) takes a chunk of
// tokens page by page: scores, then probabilities. What the first-level cache has to hold stays small: the scores of
// two pages and the probabilities of a chunk. Then the chunk's values are added up. All groups walk one segment of
// tokens before the next, so that its keys and values come from memory once and stay in the second-level cache. Few
// rows (decode) stream keys and values once; pages lie scattered, so what comes next is always asked for early. Many
// rows have their softmax between the products (attention_woven.h).
//
// The softmax does without the running maximum. Any shift of the exponents serves as long as nothing overflows, so a
// row keeps the one of its first page until a score exceeds it by kHeadroom. Shifts are whole powers of two: to change
// one is exact, and no row's bits depend on when it happens.
#ifndef TR_RUNG
#include <type_traits>

#include "attention_batch.h"
#define TR_ONLY_AMX
#define TR_SOURCE "attention_amx.cpp"
#include "foreach_isa.h"
#else
#include "amx.h"
#include "attention_task.h"
#include "attention.h"
#include "attention_tiles.h"

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

class TileTask {
 public:
  TileTask(const Problem& problem, const Task& task, TileScratch& scratch, int64_t unit_pages = kChunkPages)
      : problem_(problem),
        task_(task),
        scratch_(scratch),
        unit_pages_(unit_pages),
        d_(problem.dims()),
        key_dims_(problem.key_dims()),
        steps_((key_dims_ + 31) / 32),
        lane_groups_((d_ + 15) / 16),
        groups_((task.rows + kGroup - 1) / kGroup) {}

  void run() {
    if (task_.length == 0) {
      clear_rows<bf16>(problem_, task_);
      return;
    }
    load_rows();
    const Tiles tiles(tile_rows());
    Unit units[2];
    units[1].buffer = 1;
    look_up(units[0], 0, 0);
    bool more = true;
    for (int64_t i = 0; more; ++i) {
      const Unit& unit = units[i % 2];
      Unit& next = units[(i + 1) % 2];
      more = advance(unit, next);
      probabilities(unit);
      values(unit, more ? Ahead{next.k, 0, steps_, false} : Ahead{});
    }
    store_rows();
  }

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
  int64_t last_visible(int64_t group) const { return scratch_.visible[std::min((group + 1) * kGroup, task_.rows) - 1]; }

  void look_up(Unit& unit, int64_t begin, int64_t group) {
    unit.begin = begin;
    unit.group = group;
    unit.pages = std::min(unit_pages_ * kBlock, last_visible(group) - begin + kBlock - 1) / kBlock;
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
    bf16* const k = scratch_.wide[unit.buffer * unit_pages_ + i];
    bf16* const v = k + kMaxDim * kBlock;
    widen_page(problem_.keys<int8_t>(page, task_.kv_head), key_dims_ * kBlock, k);
    widen_page(problem_.values<int8_t>(page, task_.kv_head), lane_groups_ * 16 * kBlock, v);
    unit.k[i] = k;
    unit.v[i] = v;
    unit.key_scales[i] = problem_.key_scales(page, task_.kv_head);
    unit.value_scales[i] = problem_.value_scales(page, task_.kv_head);
  }

  // All chunks of a segment for one group after the other, then the next segment.
  bool advance(const Unit& unit, Unit& next) {
    int64_t begin = unit.begin + unit_pages_ * kBlock, group = unit.group;
    const auto skip_blind_groups = [&] {
      while (group < groups_ && last_visible(group) <= begin) ++group;
    };
    if (begin % kSegment == 0 || begin >= last_visible(group)) {
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

  bool wide(const Unit& unit) const { return task_.rows - unit.group * kGroup > 16; }
  float* output(const Unit& unit) { return scratch_.o + unit.group * kGroup * lane_groups_ * 16; }

  void probabilities(const Unit& unit) {
    scores(unit, 0);
    for (int64_t page = 0; page < unit.pages; ++page) {
      if (page + 1 < unit.pages) {
        scores(unit, page + 1);
      } else {
        const Ahead first_values{unit.v, 0, unit.pages, true};
        for (int64_t i = 0; i < unit.pages; ++i) first_values.fetch(i);
      }
      softmax(unit, page);
    }
  }

  void scores(const Unit& unit, int64_t page) {
    const bf16* q = scratch_.q + unit.group * 2 * steps_ * kTile;
    const Ahead ahead = page + 1 < unit.pages ? Ahead{unit.k + page + 1, 0, steps_, false} : Ahead{};
    float* s = scratch_.s[page % 2];
    wide(unit) ? page_scores<2>(q, unit.k[page], key_dims_, s, ahead)
               : page_scores<1>(q, unit.k[page], key_dims_, s, ahead);
  }

  void softmax(const Unit& unit, int64_t page) {
    softmax(unit, page, scratch_.s[page % 2], scratch_.p, [](auto&) {}, [] {});
  }

  // All rows of a page. `weave(rows)` may do some of them between its own instructions; `settle` makes sure that `o`
  // has all that earlier units add to it.
  template <class Weave, class Settle>
  void softmax(const Unit& unit, int64_t page, const float* s, bf16* p, Weave&& weave, Settle&& settle) {
    const PageRows of_page = rows_of(unit, page);
    const int64_t begin = unit.begin + page * kBlock;
    if (begin == 0) set_shifts(unit, page, of_page, s, p, -std::numeric_limits<float>::infinity());
    const bool whole = of_page.hidden <= 0 && of_page.visible[0] >= begin + kBlock;
    const auto compute = [&](auto is_whole, auto is_quantized) {
      using Rows = RowWork<is_whole, is_quantized>;
      const int64_t first = unit.group * kGroup;
      const auto rows_of_page = [&] {
        const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
        return Rows{of_page,
                    0,
                    std::min(kGroup, task_.rows - first),
                    s,
                    scratch_.shift + first,
                    sums_[unit.group],
                    spare_sums_,
                    p + page * kPageScores,
                    nothing};
      };
      Rows rows = rows_of_page();
      weave(rows);
      rows.finish();
      if (_mm512_reduce_max_ps(rows.largest) > kHeadroom) {
        settle();
        set_shifts(unit, page, of_page, s, p, kHeadroom);
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
    PageRows of_page{scratch_.visible + unit.group * kGroup, begin, task_.hidden - begin, {}, {}};
    for (int half = 0; half < 2; ++half) {
      of_page.key_factor[half] = _mm512_set1_ps(scale());
      if (!problem_.quantized()) continue;
      // Beyond the sequence a scale may be anything.
      const __mmask16 ours = lanes(of_page.hidden - 16 * half, task_.length - begin - 16 * half);
      const __m512 keys = _mm512_maskz_loadu_ps(ours, unit.key_scales[page] + 16 * half);
      of_page.key_factor[half] = _mm512_mul_ps(of_page.key_factor[half], keys);
      of_page.value_factor[half] = _mm512_maskz_loadu_ps(ours, unit.value_scales[page] + 16 * half);
    }
    return of_page;
  }

  // Moves the shift of every row of which a score exceeds it by more than `headroom` to that score.
  void set_shifts(const Unit& unit, int64_t page, const PageRows& of_page, const float* scores, bf16* probabilities,
                  float headroom) {
    const int64_t first = unit.group * kGroup, rows = std::min(kGroup, task_.rows - first);
    for (int64_t r = 0; r < rows; ++r) {
      const float* s = scores + r * 16;
      float& shift = scratch_.shift[first + r];
      // The exponents as page_probabilities rounds them: whether the shift moves must depend on the row alone.
      const float origin = unit.begin == 0 && page == 0 ? 0.0f : shift;
      const float largest = _mm512_reduce_max_ps(
          _mm512_max_ps(of_page.exponents<false>(s, r, 0, origin), of_page.exponents<false>(s, r, 1, origin)));
      if (!(largest > headroom)) continue;
      const float old = shift;
      shift = origin + std::ceil(largest);
      if (page == 0 && unit.begin == 0) continue;  // nothing summed yet
      const __m512 factor = power_of_two(_mm512_set1_ps(old - shift));
      float* sum = sums_[unit.group] + r * 16;
      _mm512_store_ps(sum, _mm512_mul_ps(_mm512_load_ps(sum), factor));
      for (int64_t i = 0; i < lane_groups_ && unit.begin > 0; ++i) {
        float* o = output(unit) + (i * kGroup + r) * 16;
        _mm512_store_ps(o, _mm512_mul_ps(_mm512_load_ps(o), factor));
      }
      for (int64_t before = 0; before < page; ++before) {
        bf16* p = probabilities + before * kPageScores + r * kBlock;
        for (int64_t i = 0; i < kBlock; i += 16) store(p + i, load(p + i) * Vec{factor});
      }
    }
  }

  void values(const Unit& unit, const Ahead& then) {
    float* o = output(unit);
    for (int64_t i = 0; i < lane_groups_; i += 2) {
      const Ahead ahead = i + 2 < lane_groups_ ? Ahead{unit.v, (i + 2) * 16 * kBlock, unit.pages, true} : then;
      if (i + 1 < lane_groups_) {
        wide(unit) ? lane_values<2, 2>(scratch_.p, unit, i, o, ahead)
                   : lane_values<1, 2>(scratch_.p, unit, i, o, ahead);
      } else {
        wide(unit) ? lane_values<2, 1>(scratch_.p, unit, i, o, ahead)
                   : lane_values<1, 1>(scratch_.p, unit, i, o, ahead);
      }
    }
  }

  void load_rows() {
    // Rows that only fill up a tile hold anything: no row of a product depends on another.
    const __m512i sign = _mm512_set1_epi16(problem_.scale < 0 ? -0x8000 : 0);
    for (int64_t r = 0; r < task_.rows; ++r) {
      bf16* to = scratch_.q + r / 16 * steps_ * kTile + r % 16 * 32;
      const bf16* from = task_.element<bf16>(problem_.q, r);
      for (int64_t i = 0; i < steps_; ++i) {
        const int64_t n = std::clamp<int64_t>(d_ - 32 * i, 0, 32);
        const __m512i row = _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), from + 32 * i);
        _mm512_store_si512(to + i * kTile, _mm512_xor_si512(row, sign));
      }
    }
    for (int64_t r = 0; r < task_.rows; ++r) scratch_.visible[r] = task_.visible(r);
    std::fill_n(scratch_.shift, task_.rows, -std::numeric_limits<float>::infinity());
    for (int64_t group = 0; group < groups_; ++group) sums_[group] = scratch_.sum[group][0];
    spare_sums_ = scratch_.sum[groups_][0];
    std::memset(scratch_.sum, 0, sizeof(scratch_.sum[0]) * static_cast<size_t>(groups_));
  }

  void store_rows() const {
    for (int64_t r = 0; r < task_.rows; ++r) {
      const float total = sum(load(sums_[r / kGroup] + r % kGroup * 16));
      if (problem_.lse) {
        *task_.element<float>(problem_.lse, r) = (scratch_.shift[r] + std::log2(total)) * 0.693147180559945309f;
      }
      const Vec factor = set(1.0f / total);
      const float* o = scratch_.o + r / kGroup * kGroup * lane_groups_ * 16 + r % kGroup * 16;
      bf16* out = task_.element<bf16>(problem_.out, r);
      for (int64_t i = 0; i < d_; i += 16, o += kGroup * 16) {
        const Vec value = load(o) * factor + zero();  // + 0: no negative zero, whatever zeros were added before
        if (d_ - i < 16) {
          store(out + i, value, d_ - i);
        } else {
          store(out + i, value);
        }
      }
    }
  }

  const Problem& problem_;
  const Task& task_;
  TileScratch& scratch_;
  const int64_t unit_pages_;
  float *sums_[kTaskRows / kGroup], *spare_sums_;  // of a group's rows, 16 lanes each
  const int64_t d_, key_dims_, steps_, lane_groups_, groups_;
  bool cut_[2] = {};
};

#include "attention_woven.h"

static void attention(const Args& args, Team& team) {
  if (args.tensor(0).dtype == DType::f32) {
    attention_by_vectors<float>(args, team);
    return;
  }
  const Problem problem = checked_problem(args, team);
  auto& scratch = *static_cast<TileScratch*>(team.scratch(sizeof(TileScratch)));
  // Few rows are bound by memory: reading a page costs about as much as four groups' arithmetic.
  const auto cost = [](const Task& task) {
    return (task.rows + kGroup - 1 + 4 * kGroup) / kGroup * (task.visible(task.rows - 1) + 1);
  };
  deal_tasks(args, kTaskRows, cost, team, [&](const Task& task) {
    task.rows > kGroup ? WovenTask(problem, task, scratch).run() : TileTask(problem, task, scratch).run();
  });
}
TR_KERNEL(attention)

}  // namespace tilerank::TR_RUNG
#endif
