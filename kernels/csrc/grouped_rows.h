// Products of rows with the weights of grouped.h in vectors, for the rung that includes this file (no include guard;
// grouped.h comes before).
//
// A row's total with an output is a chain over the groups: the products with a group's values, summed from zero in a
// chain of their own, less zero * (sum of the inputs), times the scale, are added, fused. Few rows multiply values as
// they come out of their codes; for more rows a group of a block is expanded once.
#include "panels.h"
//
#include "grouped_formats.h"

namespace tilerank::TR_RUNG {

// Rows as panels, and the sums of their inputs for every group, which only zeros ask for.
class GroupedRows {
 public:
  static size_t bytes(int64_t m, int64_t k, int64_t groups) {
    return panels_bytes(m, k) + static_cast<size_t>(m * groups) * sizeof(float);
  }

  GroupedRows(void* memory, int64_t m, int64_t k)
      : panels(memory, m, k, units_of<bf16>(padded(k))),
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

  const RowPanels<bf16> panels;
  float* const input_sums;  // [groups][m]

 private:
  static int64_t padded(int64_t k) { return blocks(k, kBlockK) * kBlockK; }
  static size_t panels_bytes(int64_t m, int64_t k) { return RowPanels<bf16>::bytes(m, padded(k)); }

  static float sum(const bf16* x, int64_t count) {
    Vec total = zero();
    for_lanes(count, [&](int64_t i, auto lanes) { total = total + lanes.load(x + i); });
    return TR_RUNG::sum(total);
  }

  const int64_t k_;
};

// A group of a block: how its products are added to totals.
template <class Format>
class GroupScale {
 public:
  GroupScale(const Format& weight, int64_t block, int64_t group) : has_zeros_(weight.has_zeros()) {
    for (int v = 0; v < kVecs; ++v) {
      scales_[v] = weight.scale(block, group, v) * set(static_cast<float>(1 << Format::kExponent));
      if (has_zeros_) less_[v] = weight.negative_zero(block, group, v);
    }
  }

  // totals[32] of a row += its products(v)
  template <class Products>
  [[gnu::always_inline]] void add(const Products& products, const float* input_sum, float* totals) const {
    const Vec inputs = has_zeros_ ? set(*input_sum) : zero();
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      const Vec sum = has_zeros_ ? fma(less_[v], inputs, products(v)) : products(v);
      store(totals + v * kLanes, fma(sum, scales_[v], load(totals + v * kLanes)));
    }
  }

 private:
  const bool has_zeros_;
  Vec scales_[kVecs], less_[kVecs];
};

constexpr int64_t kUnitsOfTile = units_of<bf16>(kBlockK);

template <int P, class Line>
static inline std::array<Pair, kVecs> pairs_of(const std::array<Line, kVecs>& lines) {
  std::array<Pair, kVecs> pairs;
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) pairs[v] = lines[v].template pair<P>();
  return pairs;
}

// f(unit in the tile, pairs) for every two inputs of a tile. `ahead` bytes further are asked for, if any.
template <class Format, int64_t ahead, class F>
[[gnu::always_inline]] static inline void for_pairs(const char* tile, const F& f) {
  using Line = typename Format::Line;
  for (int64_t i = 0; i < kBlockK / Line::kInputs; ++i) {
    const auto line = [&](int v) {
      const char* const at = tile + v * kLanes / kHalfN * Format::kPackedTile + i * 64;
      if (ahead && v * kLanes % kHalfN == 0) _mm_prefetch(at + ahead, _MM_HINT_T0);
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

constexpr int kFewRows = kLanes == 16 ? 8 : 3;

// totals[R][32] of a block with all R rows.
template <int R, class Format>
static void multiply_codes(const GroupedRows& rows, const Format& weight, int64_t block, int64_t k, float* totals) {
  constexpr int64_t kAhead = 3 << 10;
  const Unit<bf16>* x = rows.panels.at(0, 0);
  const char* tile = weight.tile(block, 0);
  std::fill_n(totals, R * kBlockN, 0.0f);
  int64_t left = blocks(k, kBlockK);
  for (int64_t group = 0; group < weight.groups; ++group) {
    Vec sums[R][kVecs];
    for (auto& sum : sums) std::fill_n(sum, kVecs, zero());
    const int64_t tiles = std::min(weight.group_tiles, left);
    left -= tiles;
    for (int64_t i = 0; i < tiles; ++i, tile += 2 * Format::kPackedTile, x += R * kUnitsOfTile) {
      for_pairs<Format, kAhead>(tile, [&](int64_t unit, const auto& pairs) {
#ifdef TR_BF16
        add_unit<R>(x + unit * R, [&](int v) { return pairs[v]; }, sums);
#else
        add_unit<R>(x + unit * R, [&](int v) { return pairs[v].a; }, sums);
        add_unit<R>(x + (unit + 1) * R, [&](int v) { return pairs[v].b; }, sums);
#endif
      });
    }
    weight.fetch_scales(block, group + 8);
    const GroupScale scale(weight, block, group);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      scale.add([&](int v) { return sums[r][v]; }, rows.input_sums + group * R + r, totals + r * kBlockN);
    }
  }
}
template <int R, class Format>
static void multiply_codes(int64_t m, const GroupedRows& rows, const Format& weight, int64_t block, int64_t k,
                           float* totals) {
  if constexpr (R > 1) {
    if (m < R) return multiply_codes<R - 1>(m, rows, weight, block, k, totals);
  }
  multiply_codes<R>(rows, weight, block, k, totals);
}

// An expanded group, as multiply_panel takes it.
using Expanded = std::conditional_t<kPaired<bf16>, bf16, float>;

template <class Format>
static void expand_tile(const char* tile, Expanded* to) {
  for_pairs<Format, 0>(tile, [&](int64_t unit, const auto& pairs) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
#ifdef TR_BF16
      _mm512_store_si512(to + v * kTile + unit * 32, pairs[v].v);
#else
      store(to + unit * kBlockN + v * kLanes, pairs[v].a);
      store(to + (unit + 1) * kBlockN + v * kLanes, pairs[v].b);
#endif
    }
  });
}

// The memory that multiply_expanded works with.
template <class Format>
static size_t expanded_bytes(const Format& weight) {
  return static_cast<size_t>(weight.group_tiles * 2 * kTile) * sizeof(Expanded) + kPanelRows * kBlockN * sizeof(float);
}

// totals[row][32] += a group of a block with `chosen` panels.
template <class Format>
static void multiply_expanded(const GroupedRows& rows, Range chosen, const Format& weight, int64_t block, int64_t group,
                              int64_t k, void* memory, float* totals) {
  const RowPanels<bf16>& panels = rows.panels;
  const char* const next = weight.tile(block, (group + 1) * weight.group_tiles);
  const int64_t first = group * weight.group_tiles;
  const int64_t tiles = std::min(weight.group_tiles, blocks(k, kBlockK) - first);
  Expanded* const expanded = static_cast<Expanded*>(memory);
  float* const sums = reinterpret_cast<float*>(expanded + weight.group_tiles * 2 * kTile);
  for (int64_t i = 0; i < tiles; ++i) {
    expand_tile<Format>(weight.tile(block, first + i), expanded + i * 2 * kTile);
  }
  const GroupScale scale(weight, block, group);
  // What comes next in memory is asked for in as many parts as there are panels.
  const int64_t step = std::max<int64_t>(2 * Format::kPackedTile / kUnitsOfTile / (chosen.end - chosen.begin), 1);
  const Range units{first * kUnitsOfTile, (first + tiles) * kUnitsOfTile};
  for (int64_t panel = chosen.begin; panel < chosen.end; ++panel) {
    const int64_t count = panels.rows(panel), row = panels.first_row(panel);
    for (int64_t unit = units.begin; unit < units.end;) {
      const int64_t end = std::min(units.end, (unit / kPart + 1) * kPart);
      multiply_panel(
          count, panels.at(panel, unit), expanded + (unit - units.begin) / kUnitsOfTile * 2 * kTile, end - unit, sums,
          unit > units.begin,
          Ahead{next + ((panel - chosen.begin) * (units.end - units.begin) + unit - units.begin) * step, step});
      unit = end;
    }
    for (int64_t r = 0; r < count; ++r) {
      scale.add([&](int v) { return load(sums + r * kBlockN + v * kLanes); },
                rows.input_sums + group * panels.m + row + r,
                totals + (row + r - panels.first_row(chosen.begin)) * kBlockN);
    }
  }
}

// As many panels and blocks as are multiplied together: of a part of k their inputs and their totals stay in the
// second-level cache.
constexpr int64_t kStripePanels = kLanes == 16 ? 18 : 64, kBandBlocks = 8;
constexpr int64_t kBandInputs = 384;
static constexpr int64_t kTotals = kStripePanels * kPanelRows * kBandBlocks * kBlockN;

// totals[block][row][32] of a band of blocks with `chosen` panels.
template <class Format>
static void multiply_band(const GroupedRows& rows, Range chosen, const Format& weight, Range band, int64_t k,
                          void* memory, float* totals) {
  const int64_t count = rows.panels.first_row(chosen.end) - rows.panels.first_row(chosen.begin);
  std::fill_n(totals, (band.end - band.begin) * count * kBlockN, 0.0f);
  const int64_t step = std::max<int64_t>(1, kBandInputs / (weight.group_tiles * kBlockK));
  for (int64_t first = 0; first < weight.groups; first += step) {
    for (int64_t block = band.begin; block < band.end; ++block) {
      for (int64_t group = first; group < std::min(first + step, weight.groups); ++group) {
        multiply_expanded(rows, chosen, weight, block, group, k, memory,
                          totals + (block - band.begin) * count * kBlockN);
      }
    }
  }
}

static inline std::array<Vec, kVecs> load_row(const float* totals) {
  std::array<Vec, kVecs> row;
  for (int v = 0; v < kVecs; ++v) row[v] = load(totals + v * kLanes);
  return row;
}

// emit(row, result, const float* const (&sums)[kParts]) gets the totals of rows, each with kParts blocks: those of
// results own.begin ... lie one after the other in the weight. `memory`: results_bytes
template <int kParts, class Format, class Emit>
static void multiply_results(const GroupedRows& rows, Range chosen, const Format& weight, Range own, int64_t k,
                             void* memory, const Emit& emit) {
  float* const totals = static_cast<float*>(memory);
  void* const expanded = totals + kTotals;
  const int64_t first_row = rows.panels.first_row(chosen.begin), m = rows.panels.first_row(chosen.end) - first_row;
  const bool few = rows.panels.m <= kFewRows;
  const int64_t band = few ? 1 : kBandBlocks / kParts;
  for (int64_t result = own.begin; result < own.end; result += band) {
    const int64_t end = std::min(result + band, own.end);
    if (few) {
      for (int part = 0; part < kParts; ++part) {
        multiply_codes<kFewRows>(m, rows, weight, result * kParts + part, k, totals + part * m * kBlockN);
      }
    } else {
      multiply_band(rows, chosen, weight, {result * kParts, end * kParts}, k, expanded, totals);
    }
    for (int64_t i = result; i < end; ++i) {
      for (int64_t r = 0; r < m; ++r) {
        const float* sums[kParts];
        for (int part = 0; part < kParts; ++part) {
          sums[part] = totals + (((i - result) * kParts + part) * m + r) * kBlockN;
        }
        emit(first_row + r, i, sums);
      }
    }
  }
}
template <class Format>
static size_t results_bytes(const Format& weight) {
  return kTotals * sizeof(float) + expanded_bytes(weight);
}

}  // namespace tilerank::TR_RUNG
