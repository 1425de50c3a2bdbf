// attention with both products of bf16 on tiles, for prefill and decode alike: a tile sums in another order than
// vdpbf16ps does, and a row must have the same bits in both.
//
// A task is up to kTaskRows rows of one sequence and KV head. A group of 32 rows (two by two tiles) takes a chunk of
// tokens page by page: scores, then probabilities. What the first-level cache has to hold stays small: the scores of
// two pages and the probabilities of a chunk. Then the chunk's values are added up. All groups walk one segment of
// tokens before the next, so that its keys and values come from memory once and stay in the second-level cache. Few
// rows (decode) stream keys and values once; pages lie scattered, so what comes next is always asked for early. Tiles
// and vectors share an execution port, so that mixing their instructions gains next to nothing.
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
#include "attention.h"
#include "attention_tiles.h"

namespace tilerank::TR_RUNG {

// --- a task --------------------------------------------------------------------------------------------------------

// The first `n` tokens of a page of values, the rest zero: memory past the sequence may hold NaN, and 0 * NaN is NaN.
static void cut_values(const bf16* page, int64_t n, int64_t lane_groups, bf16* copy) {
  for (int64_t group = 0; group < lane_groups; ++group) {
    for (int64_t pair = 0; pair < kBlock / 2; ++pair, page += 32, copy += 32) {
      const int64_t tokens = std::clamp<int64_t>(n - 2 * pair, 0, 2);
      const __mmask32 kept = tokens == 2 ? ~0u : tokens == 1 ? 0x55555555u : 0u;
      _mm512_store_si512(copy, _mm512_maskz_loadu_epi16(kept, page));
    }
  }
}

class TileTask {
 public:
  TileTask(const Problem& problem, const Task& task, TileScratch& scratch)
      : problem_(problem),
        task_(task),
        scratch_(scratch),
        d_(problem.q.size[2]),
        steps_((d_ + 31) / 32),
        lane_groups_((d_ + 15) / 16),
        groups_((task.rows + kGroup - 1) / kGroup) {}

  void run() {
    if (task_.visible(task_.rows - 1) == 0) {
      clear_rows();
      return;
    }
    load_rows();
    TileConfig config;
    // Few rows take few cycles.
    const int rows = static_cast<int>(std::min<int64_t>(task_.rows, 16));
    for (int tile = 0; tile < 8; ++tile) config.set(tile, tile < 6 ? rows : 16, 64);
    const Tiles tiles(config);
    Unit units[2];
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

 private:
  // Positive, so that -inf stays what it is; the sign went to q.
  float scale() const {
    return std::max(std::fabs(problem_.scale) * 1.44269504088896341f, std::numeric_limits<float>::min());
  }
  int64_t last_visible(int64_t group) const { return scratch_.visible[std::min((group + 1) * kGroup, task_.rows) - 1]; }

  void look_up(Unit& unit, int64_t begin, int64_t group) {
    unit.begin = begin;
    unit.group = group;
    unit.pages = std::min(kTileChunk, last_visible(group) - begin + kBlock - 1) / kBlock;
    for (int64_t i = 0; i < unit.pages; ++i) {
      const int64_t first = begin + i * kBlock, page = problem_.page(task_.sequence, first / kBlock);
      unit.k[i] = problem_.k_pages.row<bf16>(page) + task_.kv_head * problem_.k_pages.stride[1];
      unit.v[i] = problem_.v_pages.row<bf16>(page) + task_.kv_head * problem_.v_pages.stride[1];
      if (const int64_t n = task_.length - first; n < kBlock) {
        if (!tail_cut_) cut_values(unit.v[i], n, lane_groups_, scratch_.tail);
        tail_cut_ = true;
        unit.v[i] = scratch_.tail;
      }
    }
  }

  // All chunks of a segment for one group after the other, then the next segment.
  bool advance(const Unit& unit, Unit& next) {
    int64_t begin = unit.begin + kTileChunk, group = unit.group;
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
    wide(unit) ? page_scores<2>(q, unit.k[page], d_, s, ahead) : page_scores<1>(q, unit.k[page], d_, s, ahead);
  }

  void softmax(const Unit& unit, int64_t page) {
    const int64_t first = unit.group * kGroup, rows = std::min(kGroup, task_.rows - first);
    const int64_t begin = unit.begin + page * kBlock, *visible = scratch_.visible + first;
    if (begin == 0) set_shifts(unit, page, -std::numeric_limits<float>::infinity());
    const bool whole = visible[0] >= begin + kBlock;
    auto* const compute = whole ? page_probabilities<true> : page_probabilities<false>;
    const auto run = [&] {
      return compute(scratch_.s[page % 2], scratch_.p + page * kPageScores, rows, visible, begin, scale(),
                     scratch_.shift + first, scratch_.page_sum);
    };
    if (run() > kHeadroom) {
      set_shifts(unit, page, kHeadroom);
      run();
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* sum = scratch_.sum[first + r];
      _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), _mm512_load_ps(scratch_.page_sum[r])));
    }
  }

  // Moves the shift of every row of which a score exceeds it by more than `headroom` to that score.
  void set_shifts(const Unit& unit, int64_t page, float headroom) {
    const int64_t first = unit.group * kGroup, rows = std::min(kGroup, task_.rows - first);
    for (int64_t r = 0; r < rows; ++r) {
      const float* s = scratch_.s[page % 2] + r * kBlock;
      const int64_t visible = scratch_.visible[first + r] - unit.begin - page * kBlock;
      const float largest =
          _mm512_reduce_max_ps(_mm512_max_ps(seen_scores(s, visible), seen_scores(s + 16, visible - 16)));
      float& shift = scratch_.shift[first + r];
      // The exponent as page_probabilities rounds it: whether the shift moves must depend on the row alone.
      if (!(std::fma(largest, scale(), -shift) > headroom)) continue;
      const float old = shift;
      shift = std::ceil(largest * scale());
      if (page == 0 && unit.begin == 0) continue;  // nothing summed yet
      const __m512 factor = power_of_two(_mm512_set1_ps(old - shift));
      float* sum = scratch_.sum[first + r];
      _mm512_store_ps(sum, _mm512_mul_ps(_mm512_load_ps(sum), factor));
      for (int64_t i = 0; i < lane_groups_ && unit.begin > 0; ++i) {
        float* o = output(unit) + (i * kGroup + r) * 16;
        _mm512_store_ps(o, _mm512_mul_ps(_mm512_load_ps(o), factor));
      }
      for (int64_t before = 0; before < page; ++before) {
        bf16* p = scratch_.p + before * kPageScores + r * kBlock;
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
        const int64_t n = std::min<int64_t>(32, d_ - 32 * i);
        const __m512i row = _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), from + 32 * i);
        _mm512_store_si512(to + i * kTile, _mm512_xor_si512(row, sign));
      }
    }
    for (int64_t r = 0; r < task_.rows; ++r) scratch_.visible[r] = task_.visible(r);
    std::fill_n(scratch_.shift, task_.rows, -std::numeric_limits<float>::infinity());
    std::memset(scratch_.sum, 0, sizeof(scratch_.sum[0]) * static_cast<size_t>(task_.rows));
  }

  void clear_rows() const {
    for (int64_t r = 0; r < task_.rows; ++r) {
      std::memset(static_cast<void*>(task_.element<bf16>(problem_.out, r)), 0, sizeof(bf16) * static_cast<size_t>(d_));
      if (problem_.lse) *task_.element<float>(problem_.lse, r) = -std::numeric_limits<float>::infinity();
    }
  }

  void store_rows() const {
    for (int64_t r = 0; r < task_.rows; ++r) {
      const float total = sum(load(scratch_.sum[r]));
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
  const int64_t d_, steps_, lane_groups_, groups_;
  bool tail_cut_ = false;
};

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
  Deal deal;
  for_tasks(args, kTaskRows, [&](const Task& task) { deal.total += cost(task); });
  for_tasks(args, kTaskRows, [&](const Task& task) {
    if (deal.next_owner(cost(task), team.count) == team.index) TileTask(problem, task, scratch).run();
  });
}
TR_KERNEL(attention)

}  // namespace tilerank::TR_RUNG
#endif
