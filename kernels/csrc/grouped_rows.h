// Products of rows with the weights of grouped.h in vectors, for the rung that includes this file (no include guard;
// grouped.h comes before).
//
// A row's total with an output is a chain over the groups: the products with a group's values, summed from zero in a
// chain of their own, less zero * (sum of the inputs), times the scale, are added, fused. Values times scale could be
// summed in one chain of fp32, but not as pairs of bf16, and one row would pay for a product more with every value.
// Panels multiply values as they come out of their codes, or, without products of bf16 pairs, those of many rows a
// piece of a group that is expanded once for all (grouped_expanded.h).
#include "panels.h"
//
#include "grouped_formats.h"

namespace tilerank::TR_RUNG {

constexpr bool kExpandsOnce = !kPaired<bf16>;  // for many rows

// Rows as panels, and the sums of their inputs for every group, which only zeros ask for. `few`: so few that a block of
// the weight is read from its beginning to its end for each panel.
class GroupedRows {
 public:
  static size_t bytes(int64_t m, int64_t k, int64_t groups) {
    return panels_bytes(m, k) + static_cast<size_t>(m * groups) * sizeof(float);
  }

  template <class Format>
  GroupedRows(void* memory, int64_t m, int64_t k, const Format& weight)
      : few(m <= Format::kFewRows),
        panels(memory, m, k, units_of<bf16>(padded(k)), few ? units_of<bf16>(padded(k)) : part_of(weight),
               Format::kMostRows),
        input_sums(reinterpret_cast<float*>(static_cast<char*>(memory) + panels_bytes(m, k))),
        k_(k) {}

  // What is dealt out to this thread; row(i) is where the inputs of row i are.
  template <class Format, class Row>
  void pack(const Row& row, const Format& weight, const Team& team) const {
    panels.pack(row, team);
    if (!weight.has_zeros()) return;
    const int64_t inputs = weight.group_tiles * kBlockK;
    const Range own = team.share(panels.m);
    for (int64_t i = own.begin; i < own.end; ++i) {
      for (int64_t group = 0; group < weight.groups; ++group) {
        input_sums[group * panels.m + i] = sum(row(i) + group * inputs, std::min(inputs, k_ - group * inputs));
      }
    }
  }

  const bool few;
  const RowPanels<bf16> panels;
  float* const input_sums;  // [groups][m]

 private:
  // Whole groups, where they are not expanded piece by piece.
  template <class Format>
  static int64_t part_of(const Format& weight) {
    const int64_t group = weight.group_tiles * units_of<bf16>(kBlockK);
    return kExpandsOnce ? kPart : std::max<int64_t>(kPart / group, 1) * group;
  }
  static int64_t padded(int64_t k) { return blocks(k, kBlockK) * kBlockK; }
  static size_t panels_bytes(int64_t m, int64_t k) { return RowPanels<bf16>::bytes(m, padded(k)); }

  static float sum(const bf16* x, int64_t count) {
    Vec total = zero();
    for_lanes(count, [&](int64_t i, auto lanes) { total = total + lanes.load(x + i); });
    return TR_RUNG::sum(total);
  }

  const int64_t k_;
};

// A group of a block: how the sums of its products are added to totals.
template <class Format>
class GroupScale {
 public:
  GroupScale(const Format& weight, int64_t block, int64_t group) : has_zeros_(weight.has_zeros()) {
    for (int v = 0; v < kVecs; ++v) {
      scales_[v] = weight.scale(block, group, v) * set(static_cast<float>(1 << Format::kExponent));
      if (has_zeros_) less_[v] = weight.negative_zero(block, group, v);
    }
  }

  // totals[R][32] += the sums of R rows
  template <int R>
  [[gnu::always_inline]] void add(Vec (&sums)[R][kVecs], const float* input_sums, float* totals) const {
    if (has_zeros_) {
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) sums[r][v] = fma(less_[v], set(input_sums[r]), sums[r][v]);
      }
    }
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        float* const to = totals + r * kBlockN + v * kLanes;
        store(to, fma(sums[r][v], scales_[v], load(to)));
      }
    }
  }

 private:
  const bool has_zeros_;
  Vec scales_[kVecs], less_[kVecs];
};

constexpr int64_t kUnitsOfTile = units_of<bf16>(kBlockK);

// Where lines are read no faster than they are expanded nothing is gained by their order.
template <int R, class Format>
constexpr bool in_order = R <= kRowsInOrder && Format::kWaitsForMemory;

template <int R, class Format>
[[gnu::always_inline]] static inline void add_codes_in_order(const Unit<bf16>* x, const char* tile, int64_t ahead,
                                                             Vec (&sums)[R][kVecs]) {
  using Line = typename Format::Line;
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    for (int64_t i = 0; i < kBlockK / Line::kInputs; ++i, tile += 64) {
      _mm_prefetch(tile + ahead, _MM_HINT_T0);
#pragma GCC unroll 2
      for (int v = 0; v < kVecs / 2; ++v) {
        const Line line(tile + v * kLanes * 4);
        [&]<int... P>(std::integer_sequence<int, P...>) {
          (add_pair<R>(x + (i * Line::kInputs + 2 * P) * kUnitsOfTile / kBlockK * R, line.template pair<P>(),
                       half * kVecs / 2 + v, sums),
           ...);
        }(std::make_integer_sequence<int, Line::kInputs / 2>{});
      }
    }
  }
}

template <int P, class Line>
static inline std::array<Pair, kVecs> pairs_of(const std::array<Line, kVecs>& lines) {
  std::array<Pair, kVecs> pairs;
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) pairs[v] = lines[v].template pair<P>();
  return pairs;
}

// Lines of a tile's half that are unrolled: with AVX-512 one, since GCC gathers the requests of several in front of
// their loads, and memory is slower then by up to a third.
constexpr int kLinesAtOnce = kLanes == 16 ? 1 : 8;

// f(unit in the tile, pairs) for every two inputs of a tile; its lines of `ahead` bytes further are asked for.
template <class Format, class F>
[[gnu::always_inline]] static inline void for_pairs(const char* tile, int64_t ahead, const F& f) {
  using Line = typename Format::Line;
#pragma GCC unroll kLinesAtOnce
  for (int64_t i = 0; i < kBlockK / Line::kInputs; ++i) {
    const auto line = [&](int v) {
      const char* const at = tile + v * kLanes / kHalfN * Format::kPackedTile + i * 64;
      if (v * kLanes % kHalfN == 0) _mm_prefetch(at + ahead, _MM_HINT_T0);
      return Line(at + v * kLanes % kHalfN * 4);
    };
    const auto lines = [&]<int... V>(std::integer_sequence<int, V...>) {
      return std::array<Line, kVecs>{line(V)...};
    }(std::make_integer_sequence<int, kVecs>{});
    [&]<int... P>(std::integer_sequence<int, P...>) {
      (f((i * Line::kInputs + 2 * P) * kUnitsOfTile / kBlockK, pairs_of<P>(lines)), ...);
    }(std::make_integer_sequence<int, Line::kInputs / 2>{});
  }
}

// sums[R] += R rows x a tile of codes: with both halves line by line, or one after the other, in the order of memory.
template <int R, class Format>
[[gnu::always_inline]] static inline void add_codes(const Unit<bf16>* x, const char* tile, int64_t ahead,
                                                    Vec (&sums)[R][kVecs]) {
  if constexpr (in_order<R, Format>) return add_codes_in_order<R, Format>(x, tile, ahead, sums);
  for_pairs<Format>(tile, ahead, [&](int64_t unit, const auto& pairs) {
#ifdef TR_BF16
    add_unit<R>(x + unit * R, [&](int v) { return pairs[v]; }, sums);
#else
    add_unit<R>(x + unit * R, [&](int v) { return pairs[v].a; }, sums);
    add_unit<R>(x + (unit + 1) * R, [&](int v) { return pairs[v].b; }, sums);
#endif
  });
}

// totals[R][32] += `tiles` tiles of a group with R rows.
template <int R, class Format>
[[gnu::always_inline]] static inline void add_group(const Unit<bf16>* x, const char* tile, int64_t tiles, int64_t ahead,
                                                    const GroupScale<Format>& scale, const float* input_sums,
                                                    float* totals) {
  Vec sums[R][kVecs];
  load_sums<R>(nullptr, sums);
  for (int64_t i = 0; i < tiles; ++i, tile += 2 * Format::kPackedTile, x += R * kUnitsOfTile) {
    add_codes<R, Format>(x, tile, ahead, sums);
  }
  scale.add(sums, input_sums, totals);
}
// The same on its own, as multiply_panel is.
template <int R, class Format>
[[gnu::noinline]] static void add_group_apart(const Unit<bf16>* x, const char* tile, int64_t tiles, int64_t ahead,
                                              const GroupScale<Format>& scale, const float* input_sums, float* totals) {
  add_group<R>(x, tile, tiles, ahead, scale, input_sums, totals);
}

// So few rows take two groups side by side: of one, each product waits for the one before.
template <class Format>
constexpr int kRowsOfTwoGroups = kLanes == 16 && !Format::kWaitsForMemory ? 4 : 0;

// totals[R][32] += two groups of so many tiles each.
template <int R, class Format>
static inline void add_two_groups(const Unit<bf16>* x, const char* tile, int64_t tiles, int64_t ahead,
                                  const GroupScale<Format>& scale, const GroupScale<Format>& next_scale,
                                  const float* input_sums, int64_t m, float* totals) {
  constexpr int64_t kBytes = 2 * Format::kPackedTile, kInputs = R * kUnitsOfTile;
  Vec sums[R][kVecs], next_sums[R][kVecs];
  load_sums<R>(nullptr, sums);
  load_sums<R>(nullptr, next_sums);
  const char* next_tile = tile + tiles * kBytes;
  for (int64_t i = 0; i < tiles; ++i, tile += kBytes, next_tile += kBytes) {
    // What is ahead is asked for in the order of memory.
    add_codes<R, Format>(x + i * kInputs, tile, ahead + i * kBytes, sums);
    add_codes<R, Format>(x + (tiles + i) * kInputs, next_tile, ahead + (i + 1 - tiles) * kBytes, next_sums);
  }
  scale.add(sums, input_sums, totals);
  next_scale.add(next_sums, input_sums + m, totals);
}

// What a panel asks memory for while it multiplies: lines of `ahead` bytes further, of the groups whose turn it is.
struct Requests {
  int64_t ahead, turn = 0, turns = 1;

  int64_t at(int64_t group) const { return turns == 1 || group % turns == turn ? ahead : 0; }
};

// totals[R][32] += groups of a block with a panel of R rows.
template <int R, class Format>
static void multiply_codes(const GroupedRows& rows, int64_t panel, const Format& weight, int64_t block, Range groups,
                           int64_t k, Requests requests, float* totals) {
  const int64_t first = groups.begin * weight.group_tiles, m = rows.panels.m;
  const Unit<bf16>* x = rows.panels.at(panel, first * kUnitsOfTile);
  const float* input_sums = rows.input_sums + groups.begin * m + rows.panels.first_row(panel);
  const char* tile = weight.tile(block, first);
  int64_t left = blocks(k, kBlockK) - first;
  for (int64_t group = groups.begin; group < groups.end; ++group, input_sums += m) {
    const int64_t tiles = std::min(weight.group_tiles, left), ahead = requests.at(group);
    const GroupScale scale(weight, block, group);
    weight.fetch_scales(block, group + 8);
    if constexpr (R <= kRowsOfTwoGroups<Format>) {
      if (group + 1 < groups.end && left >= 2 * tiles) {
        const GroupScale next_scale(weight, block, ++group);
        weight.fetch_scales(block, group + 8);
        add_two_groups<R>(x, tile, tiles, ahead, scale, next_scale, input_sums, m, totals);
        left -= 2 * tiles, tile += 4 * tiles * Format::kPackedTile, x += 2 * tiles * R * kUnitsOfTile, input_sums += m;
        continue;
      }
    }
    if constexpr (R <= kRowsInOrder) {
      add_group<R>(x, tile, tiles, ahead, scale, input_sums, totals);
    } else {
      add_group_apart<R>(x, tile, tiles, ahead, scale, input_sums, totals);
    }
    left -= tiles, tile += tiles * 2 * Format::kPackedTile, x += tiles * R * kUnitsOfTile;
  }
}

// As many panels and blocks as are multiplied together: of a part of k their inputs and their totals stay in the
// second-level cache.
constexpr int64_t kStripePanels = kLanes == 16 ? 18 : 64, kBandBlocks = 8;
constexpr int64_t kStripeRows = kStripePanels * kPanelRows;
constexpr int64_t kBandInputs = 384;

constexpr int64_t kPieceTiles = 4;  // that are expanded at a time

// What a thread multiplies with.
struct GroupedWork {
#ifndef TR_BF16
  alignas(64) float tiles[kPieceTiles * 2 * kTile];  // expanded
  float partial[kStripeRows * kBlockN];              // sums of groups that are longer than a piece
#endif
  float totals[kBandBlocks * kStripeRows * kBlockN];
};

// work.totals[block][row][32] of a band of blocks with `chosen` panels, part by part of k. What is read next comes from
// memory meanwhile: of one panel a little ahead, else where the next block begins, a share for each panel.
template <class Format>
static void multiply_band_of_codes(const GroupedRows& rows, Range chosen, const Format& weight, Range band, int64_t k,
                                   GroupedWork& work) {
  const RowPanels<bf16>& panels = rows.panels;
  const int64_t first_row = panels.first_row(chosen.begin), count = panels.first_row(chosen.end) - first_row;
  std::fill_n(work.totals, (band.end - band.begin) * count * kBlockN, 0.0f);
  const int64_t step = rows.few ? weight.groups : panels.part / (weight.group_tiles * kUnitsOfTile);
  const auto group_at = [&](int64_t block, int64_t group) { return weight.tile(block, group * weight.group_tiles); };
  for (Range groups{0, 0}; groups.begin < weight.groups; groups.begin = groups.end) {
    groups.end = std::min(groups.begin + step, weight.groups);
    for (int64_t block = band.begin; block < band.end; ++block) {
      const char* const next =
          block + 1 < band.end ? group_at(block + 1, groups.begin) : group_at(band.begin, groups.end);
      const int64_t to_next = next - group_at(block, groups.begin);
      for (int64_t panel = chosen.begin; panel < chosen.end; ++panel) {
        const int64_t to = ((block - band.begin) * count + panels.first_row(panel) - first_row) * kBlockN;
        for_rows<Format::kMostRows>(panels.rows(panel), [&](auto r) {
          constexpr int64_t kAhead = r <= kRowsOfTwoGroups<Format> ? 8 << 10 : 3 << 10;
          const Requests in_stream{in_order<r, Format> && follows_streams() ? 0 : kAhead};
          const Requests shared{to_next, panel - chosen.begin, chosen.end - chosen.begin};
          const Requests requests = rows.few && panels.panels == 1 ? in_stream : shared;
          multiply_codes<r>(rows, panel, weight, block, groups, k, requests, work.totals + to);
        });
      }
    }
  }
}

#ifndef TR_BF16
#include "grouped_expanded.h"
#endif

static inline std::array<Vec, kVecs> load_row(const float* totals) {
  std::array<Vec, kVecs> row;
  for (int v = 0; v < kVecs; ++v) row[v] = load(totals + v * kLanes);
  return row;
}

// emit(row, result, const float* const (&sums)[kParts]) gets the totals of rows, each with kParts blocks: those of
// results own.begin ... lie one after the other in the weight. `memory`: a GroupedWork
template <int kParts, class Format, class Emit>
static void multiply_results(const GroupedRows& rows, Range chosen, const Format& weight, Range own, int64_t k,
                             void* memory, const Emit& emit) {
  GroupedWork& work = *static_cast<GroupedWork*>(memory);
  const int64_t first_row = rows.panels.first_row(chosen.begin), m = rows.panels.first_row(chosen.end) - first_row;
  const int64_t band = rows.few ? 1 : kBandBlocks / kParts;
  for (int64_t result = own.begin; result < own.end; result += band) {
    const int64_t end = std::min(result + band, own.end);
    const Range of_results{result * kParts, end * kParts};
#ifdef TR_BF16
    multiply_band_of_codes(rows, chosen, weight, of_results, k, work);
#else
    rows.few ? multiply_band_of_codes(rows, chosen, weight, of_results, k, work)
             : multiply_band_expanded(rows, chosen, weight, of_results, k, work);
#endif
    for (int64_t i = result; i < end; ++i) {
      for (int64_t r = 0; r < m; ++r) {
        const float* sums[kParts];
        for (int part = 0; part < kParts; ++part) {
          sums[part] = work.totals + (((i - result) * kParts + part) * m + r) * kBlockN;
        }
        emit(first_row + r, i, sums);
      }
    }
  }
}

}  // namespace tilerank::TR_RUNG
