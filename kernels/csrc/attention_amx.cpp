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

namespace tilerank::TR_RUNG {

constexpr int64_t kGroup = 32;  // rows that go through the tiles together
constexpr int64_t kTaskRows = 4 * kGroup;
constexpr int64_t kChunkPages = 8;
constexpr int64_t kTileChunk = kChunkPages * kBlock;  // tokens between two updates of the running maximum
constexpr int64_t kSegment = 4 * kTileChunk;          // tokens that all groups meet before the next
constexpr float kHeadroom = 16;                       // a probability may reach 2^kHeadroom before the shift follows
constexpr int64_t kTile = 16 * 32;                    // bf16 elements of a tile
constexpr int64_t kPageScores = kGroup * kBlock;      // of a group

struct TileScratch {
  alignas(64) float s[2][kPageScores];       // of two pages: [row][32 tokens]
  alignas(64) bf16 p[kTileChunk * kGroup];   // [page][row][32 tokens]
  alignas(64) bf16 q[kTaskRows * kMaxDim];   // [row / 16][dim / 32][row % 16][32]
  alignas(64) float o[kTaskRows * kMaxDim];  // [row / 32][dim / 16][row % 32][16]
  alignas(64) float sum[kTaskRows][16];      // lane by lane, added up at the end
  alignas(64) float page_sum[kGroup][16];    // a page's part of it
  alignas(64) bf16 tail[kMaxDim * kBlock];
  float shift[kTaskRows];  // a whole number: a probability is 2^(score - shift)
  int64_t visible[kTaskRows];
};

// A group of rows and the chunk of tokens it meets.
struct Unit {
  int64_t begin, group, pages;
  const bf16 *k[kChunkPages], *v[kChunkPages];
};

// Memory to ask for soon, in pieces of two tiles: pages[i] + offset, or pages[0] + offset + i pieces.
struct Ahead {
  const bf16* const* pages = nullptr;
  int64_t offset = 0, count = 0;
  bool scattered = false;

  void fetch(int64_t i) const {
    if (i >= count) return;
    const bf16* piece = offset + (scattered ? pages[i] : pages[0] + i * 2 * kTile);
    for (int64_t at = 0; at < 2 * kTile; at += 32) _mm_prefetch(reinterpret_cast<const char*>(piece + at), _MM_HINT_T0);
  }
};

// --- softmax -------------------------------------------------------------------------------------------------------

// 2^x within 4e-6, far below the rounding of the result to bf16; 2^-inf = 0.
static inline __m512 power_of_two(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
  __m512 p = _mm512_fmadd_ps(r, _mm512_set1_ps(0.01355575f), _mm512_set1_ps(0.05203237f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.24137976f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.69303212f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);  // p 2^floor(x)
}

// 16 scores, of which the first `n` are seen and the rest become -inf.
static inline __m512 seen_scores(const float* s, int64_t n) {
  const __m512 hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  return _mm512_mask_load_ps(hidden, first_lanes(std::clamp<int64_t>(n, 0, 16)), s);
}

// The scores of a page to probabilities and their sums, for `rows` rows; returns the largest exponent. Row r sees the
// first visible[r] - begin of the page's tokens, the rest become zeros. Whole: all rows see all.
template <bool Whole>
static float page_probabilities(const float* s, bf16* p, int64_t rows, const int64_t* visible, int64_t begin,
                                float scale, const float* shift, float (*sums)[16]) {
  const __m512 factor = _mm512_set1_ps(scale);
  __m512 largest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  for (int64_t r = 0; r < rows; ++r, s += kBlock, p += kBlock) {
    __m512 x[2];
    for (int i = 0; i < 2; ++i) {
      const __m512 score = Whole ? _mm512_load_ps(s + 16 * i) : seen_scores(s + 16 * i, visible[r] - begin - 16 * i);
      x[i] = _mm512_fmsub_ps(score, factor, _mm512_set1_ps(shift[r]));
      largest = _mm512_max_ps(largest, x[i]);
    }
    const __m512 a = power_of_two(x[0]), b = power_of_two(x[1]);
    _mm512_store_ps(sums[r], _mm512_add_ps(a, b));
    _mm512_store_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  }
  return _mm512_reduce_max_ps(largest);
}

// --- products ------------------------------------------------------------------------------------------------------

// Tiles 0..3: sums of two row tiles times two lane groups; 4, 5: the row tiles; 6, 7: the lane groups.
template <int RowTiles, int Groups, class F>
static inline void for_sums(F&& f) {
  f(std::integral_constant<int, 0>{}, std::integral_constant<int, 0>{});
  if constexpr (Groups > 1) f(std::integral_constant<int, 0>{}, std::integral_constant<int, 1>{});
  if constexpr (RowTiles > 1) f(std::integral_constant<int, 1>{}, std::integral_constant<int, 0>{});
  if constexpr (RowTiles > 1 && Groups > 1) f(std::integral_constant<int, 1>{}, std::integral_constant<int, 1>{});
}

// One step of 32 summands: a, a2 are the row tiles with rows lda bytes apart, b and b2 the groups' [16][16][2].
template <int RowTiles, int Groups>
static inline void step(const bf16* a, const bf16* a2, int64_t lda, const bf16* b, const bf16* b2) {
  tile_load<6>(b, 64);
  tile_load<4>(a, lda);
  if constexpr (RowTiles > 1) tile_load<5>(a2, lda);
  if constexpr (Groups > 1) tile_load<7>(b2, 64);
  for_sums<RowTiles, Groups>([](auto row, auto group) { tile_dot_bf16<row * 2 + group, 4 + row, 6 + group>(); });
}

// s of one page = q k^T
template <int RowTiles>
static inline void page_scores(const bf16* q, const bf16* k, int64_t d, float* s, const Ahead& ahead) {
  const int64_t steps = (d + 31) / 32, whole = d / 32;
  const bf16* q2 = q + steps * kTile;
  for_sums<RowTiles, 2>([](auto row, auto group) { tile_zero<row * 2 + group>(); });
  for (int64_t i = 0; i < whole; ++i) {
    ahead.fetch(i);
    step<RowTiles, 2>(q + i * kTile, q2 + i * kTile, 64, k + i * kTile, k + d * 16 + i * kTile);
  }
  if (whole < steps) {
    // A tile is 32 dims high: the rest comes from a copy padded with zeros (what follows in the page may be anything).
    alignas(64) bf16 rest[2][kTile] = {};
    for (int group = 0; group < 2; ++group) {
      std::memcpy(rest[group], k + group * d * 16 + whole * kTile, static_cast<size_t>(d % 32 * 16 * 2));
    }
    ahead.fetch(whole);
    step<RowTiles, 2>(q + whole * kTile, q2 + whole * kTile, 64, rest[0], rest[1]);
  }
  for_sums<RowTiles, 2>(
      [&](auto row, auto group) { tile_store<row * 2 + group>(s + row * 16 * kBlock + group * 16, kBlock * 4); });
}

// o += p v for one or two lane groups, over the pages of a unit.
template <int RowTiles, int Groups>
static inline void lane_values(const bf16* p, const Unit& unit, int64_t lane_group, float* o, const Ahead& ahead) {
  float* const sums = o + lane_group * kGroup * 16;
  const auto at = [&](auto row, auto group) { return sums + group * kGroup * 16 + row * 256; };
  if (unit.begin == 0) {
    for_sums<RowTiles, Groups>([](auto row, auto group) { tile_zero<row * 2 + group>(); });
  } else {
    for_sums<RowTiles, Groups>([&](auto row, auto group) { tile_load<row * 2 + group>(at(row, group), 64); });
  }
  for (int64_t page = 0; page < unit.pages; ++page) {
    ahead.fetch(page);
    const bf16 *a = p + page * kPageScores, *v = unit.v[page] + lane_group * 16 * kBlock;
    step<RowTiles, Groups>(a, a + kTile, 64, v, v + 16 * kBlock);
  }
  for_sums<RowTiles, Groups>([&](auto row, auto group) { tile_store<row * 2 + group>(at(row, group), 64); });
}

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
    load_rows();
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

  void store_rows() const {
    for (int64_t r = 0; r < task_.rows; ++r) {
      const Vec factor = set(1.0f / sum(load(scratch_.sum[r])));
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
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, 64);
  const Tiles tiles(config);
  // Few rows are bound by memory: reading a page costs about as much as four groups' arithmetic.
  const auto cost = [](const Task& task) {
    return (task.rows + kGroup - 1 + 4 * kGroup) / kGroup * task.visible(task.rows - 1);
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
