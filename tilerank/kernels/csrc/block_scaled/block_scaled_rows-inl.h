// The vector micro-kernels for block-scaled weights, compiled once per rung (no include guard; include after
// block_scaled.h).
//
//   total += scale[b] * (sum(x * value) - zero[b] * sum(x)), one fused multiply-add per K-block b, in order of b;
//   total += minimum[b] * sum(x) follows in formats that have minimums
//
// The inner sum of a K-block starts from zero. One chain over all of k, of scaled values, would suffice in fp32 but not
// for pairs of bf16, and with one row it costs another product per value. Panels multiply values as they are expanded.
// On rungs without products of bf16 pairs, many rows share a piece of a K-block that is expanded once
// (block_scaled_expanded-inl.h).
#include "linear/panels-inl.h"
#include "block_scaled/block_scaled_formats-inl.h"

namespace tilerank::TR_RUNG {

constexpr bool kExpandsOnce = !kPaired<bf16>;  // for many rows

// Whether a weight takes the sums of the inputs of its K-blocks.
template <class Format>
static bool takes_input_sums(const Format& weight) {
  if constexpr (Format::kMayHaveMinimums) return weight.has_zeros() || weight.has_minimums();
  return weight.has_zeros();
}

// Rows packed as panels, and the sums of their inputs over every K-block for weights that take them. `few`: so
// few rows that a whole block of the weight is read for each panel in turn.
class BlockScaledRows {
 public:
  static size_t bytes(int64_t m, int64_t k, int64_t k_blocks) {
    return panels_bytes(m, k) + static_cast<size_t>(m * k_blocks) * sizeof(float);
  }

  template <class Format>
  BlockScaledRows(void* memory, int64_t m, int64_t k, const Format& weight)
      : few(m <= Format::kFewRows),
        panels(memory, m, k, units_of<bf16>(padded(k)), few ? units_of<bf16>(padded(k)) : part_of(weight),
               Format::kMostRows),
        input_sums(reinterpret_cast<float*>(static_cast<char*>(memory) + panels_bytes(m, k))),
        k_(k) {}

  // Packs this thread's share; row(i) points to the inputs of row i.
  template <class Format, class Row>
  void pack(const Row& row, const Format& weight, const Team& team) const {
    panels.pack(row, team);
    if (!takes_input_sums(weight)) return;
    const int64_t inputs = weight.k_block_tiles * Format::kTileInputs;
    const Range own = team.share(panels.m);
    for (int64_t i = own.begin; i < own.end; ++i) {
      for (int64_t k_block = 0; k_block < weight.k_blocks; ++k_block) {
        input_sums[k_block * panels.m + i] = sum(row(i) + k_block * inputs, std::min(inputs, k_ - k_block * inputs));
      }
    }
  }

  const bool few;
  const RowPanels<bf16> panels;
  float* const input_sums;  // [k_blocks][m]

 private:
  // The units of a part of k: whole K-blocks, unless pieces are expanded.
  template <class Format>
  static int64_t part_of(const Format& weight) {
    const int64_t k_block = weight.k_block_tiles * units_of<bf16>(Format::kTileInputs);
    return kExpandsOnce ? kPartUnits : std::max<int64_t>(kPartUnits / k_block, 1) * k_block;
  }
  static int64_t padded(int64_t k) { return blocks(k, kTileK) * kTileK; }
  static size_t panels_bytes(int64_t m, int64_t k) { return RowPanels<bf16>::bytes(m, padded(k)); }

  static float sum(const bf16* x, int64_t count) {
    Vec total = zero();
    for_lanes(count, [&](int64_t i, auto lanes) { total = total + lanes.load(x + i); });
    return TR_RUNG::sum(total);
  }

  const int64_t k_;
};

// Adds the products of one K-block of a block to totals.
template <class Format>
class KBlockScale {
 public:
  KBlockScale(const Format& weight, int64_t block, int64_t k_block) : has_zeros_(weight.has_zeros()) {
    for (int v = 0; v < kVecs; ++v) {
      scales_[v] = weight.scale(block, k_block, v) * set(kUnit);
      if (has_zeros_) less_[v] = weight.negative_zero(block, k_block, v);
    }
    if constexpr (Format::kMayHaveMinimums) {
      has_minimums_ = weight.has_minimums();
      for (int v = 0; v < kVecs && has_minimums_; ++v) minimums_[v] = weight.minimum(block, k_block, v);
    }
  }

  // totals[R][32] += the sums of R rows, V vectors of them from vector kFirst on
  template <int kFirst = 0, int R, int V>
  [[gnu::always_inline]] void add(Vec (&sums)[R][V], const float* input_sums, float* totals) const {
    if (has_zeros_) {
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[r][v] = fma(less_[kFirst + v], set(input_sums[r]), sums[r][v]);
      }
    }
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        float* const to = totals + r * kBlockN + (kFirst + v) * kLanes;
        store(to, fma(sums[r][v], scales_[kFirst + v], load(to)));
      }
    }
    if constexpr (Format::kMayHaveMinimums) {
      if (!has_minimums_) return;
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          float* const to = totals + r * kBlockN + (kFirst + v) * kLanes;
          store(to, fma(minimums_[kFirst + v], set(input_sums[r]), load(to)));
        }
      }
    }
  }

 private:
  static constexpr int kExponent = Format::kExponent;
  static constexpr float kUnit = kExponent < 0 ? 1.0f / (1 << -kExponent) : 1 << kExponent;

  struct None {};
  const bool has_zeros_;
  bool has_minimums_ = false;
  Vec scales_[kVecs], less_[kVecs];
  std::conditional_t<Format::kMayHaveMinimums, Vec[kVecs], None> minimums_;
};

template <class Format>
constexpr int64_t kUnitsOfTile = units_of<bf16>(Format::kTileInputs);

// Whether to read lines in the order of memory. It pays only if expanding a line is faster than reading it.
template <int R, class Format>
constexpr bool in_order = R <= kRowsInOrder && Format::kWaitsForMemory;

template <int R, class Format>
[[gnu::always_inline]] static inline void add_codes_in_order(const Unit<bf16>* x, const char* tile, int64_t ahead,
                                                             Vec (&sums)[R][kVecs]) {
  using Line = typename Format::Line;
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    for (int64_t i = 0; i < kTileK / Line::kInputs; ++i, tile += 64) {
      prefetch_weight<R>(tile + ahead);
#pragma GCC unroll 2
      for (int v = 0; v < kVecs / 2; ++v) {
        const Line line(tile + v * kLanes * 4);
        [&]<int... P>(std::integer_sequence<int, P...>) {
          (add_pair<R>(x + (i * Line::kInputs + 2 * P) * kUnitsOfTile<Format> / kTileK * R, line.template pair<P>(),
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

// Unroll factor of the lines of half a tile. With AVX-512 it is 1: GCC would move the prefetches of several lines in
// front of their loads, which slows reading down.
constexpr int kLinesAtOnce = kLanes == 16 ? 1 : 8;

// Calls f(unit in the tile, pairs) for every two inputs of a tile, which R rows are multiplied with, and prefetches the
// lines `ahead` bytes further.
template <int R, class Format, class F>
[[gnu::always_inline]] static inline void for_pairs(const char* tile, int64_t ahead, const F& f) {
  using Line = typename Format::Line;
  constexpr int64_t kLines = Format::kTileInputs / Line::kInputs, kCacheLines = (Format::kPackedTile + 63) / 64;
#pragma GCC unroll kLinesAtOnce
  for (int64_t i = 0; i < kLines; ++i) {
    const auto line = [&](int v) {
      const char* const half = tile + v * kLanes / kHalfN * Format::kPackedTile;
      if (v * kLanes % kHalfN == 0) {
        for (int64_t j = i * kCacheLines / kLines; j < (i + 1) * kCacheLines / kLines; ++j) {
          prefetch_weight<R>(half + j * 64 + ahead);
        }
      }
      return Line(half, i, v * kLanes % kHalfN);
    };
    const auto lines = [&]<int... V>(std::integer_sequence<int, V...>) {
      return std::array<Line, kVecs>{line(V)...};
    }(std::make_integer_sequence<int, kVecs>{});
    [&]<int... P>(std::integer_sequence<int, P...>) {
      (f((i * Line::kInputs + 2 * P) * kUnitsOfTile<Format> / Format::kTileInputs, pairs_of<P>(lines)), ...);
    }(std::make_integer_sequence<int, Line::kInputs / 2>{});
  }
}

// sums[R] += R rows x a tile of codes: both halves line by line, or one half after the other in the order of memory.
template <int R, class Format>
[[gnu::always_inline]] static inline void add_codes(const Unit<bf16>* x, const char* tile, int64_t ahead,
                                                    Vec (&sums)[R][kVecs]) {
  if constexpr (in_order<R, Format>) return add_codes_in_order<R, Format>(x, tile, ahead, sums);
  for_pairs<R, Format>(tile, ahead, [&](int64_t unit, const auto& pairs) {
#ifdef TR_BF16
    add_unit<R>(x + unit * R, [&](int v) { return pairs[v]; }, sums);
#else
    add_unit<R>(x + unit * R, [&](int v) { return pairs[v].a; }, sums);
    add_unit<R>(x + (unit + 1) * R, [&](int v) { return pairs[v].b; }, sums);
#endif
  });
}

// totals[R][32] += R rows x `tiles` tiles of a K-block.
template <int R, class Format>
[[gnu::always_inline]] static inline void add_k_block(const Unit<bf16>* x, const char* tile, int64_t tiles,
                                                      int64_t ahead, const KBlockScale<Format>& scale,
                                                      const float* input_sums, float* totals) {
  Vec sums[R][kVecs];
  load_sums<R>(nullptr, sums);
  for (int64_t i = 0; i < tiles; ++i, tile += 2 * Format::kPackedTile, x += R * kUnitsOfTile<Format>) {
    add_codes<R, Format>(x, tile, ahead, sums);
  }
  scale.add(sums, input_sums, totals);
}
// add_k_block without inlining, for the reason of multiply_panel.
template <int R, class Format>
[[gnu::noinline]] static void add_k_block_apart(const Unit<bf16>* x, const char* tile, int64_t tiles, int64_t ahead,
                                                const KBlockScale<Format>& scale, const float* input_sums,
                                                float* totals) {
  add_k_block<R>(x, tile, tiles, ahead, scale, input_sums, totals);
}

// Up to this number of rows, two K-blocks are multiplied side by side: within one, each product waits for the one
// before.
template <class Format>
constexpr int kRowsOfTwoKBlocks = kLanes == 16 && !Format::kWaitsForMemory ? 4 : 0;

// totals[R][32] += R rows x two K-blocks of `tiles` tiles each.
template <int R, class Format>
static inline void add_two_k_blocks(const Unit<bf16>* x, const char* tile, int64_t tiles, int64_t ahead,
                                    const KBlockScale<Format>& scale, const KBlockScale<Format>& next_scale,
                                    const float* input_sums, int64_t m, float* totals) {
  constexpr int64_t kBytes = 2 * Format::kPackedTile, kInputs = R * kUnitsOfTile<Format>;
  Vec sums[R][kVecs], next_sums[R][kVecs];
  load_sums<R>(nullptr, sums);
  load_sums<R>(nullptr, next_sums);
  const char* next_tile = tile + tiles * kBytes;
  for (int64_t i = 0; i < tiles; ++i, tile += kBytes, next_tile += kBytes) {
    // The prefetches follow the order of memory.
    add_codes<R, Format>(x + i * kInputs, tile, ahead + i * kBytes, sums);
    add_codes<R, Format>(x + (tiles + i) * kInputs, next_tile, ahead + (i + 1 - tiles) * kBytes, next_sums);
  }
  scale.add(sums, input_sums, totals);
  next_scale.add(next_sums, input_sums + m, totals);
}

// The lines that a panel prefetches: those `ahead` bytes further, for every K-block whose turn it is.
struct PanelPrefetch {
  int64_t ahead, turn = 0, turns = 1;

  int64_t at(int64_t k_block) const { return turns == 1 || k_block % turns == turn ? ahead : 0; }
};

// totals[R][32] += a panel of R rows x the given K-blocks of a block.
template <int R, class Format>
[[gnu::noinline]] static void multiply_codes(const BlockScaledRows& rows, int64_t panel, const Format& weight,
                                             int64_t block, Range k_blocks, int64_t k, PanelPrefetch requests,
                                             float* totals) {
  const int64_t first = k_blocks.begin * weight.k_block_tiles, m = rows.panels.m;
  const Unit<bf16>* x = rows.panels.at(panel, first * kUnitsOfTile<Format>);
  const float* input_sums = rows.input_sums + k_blocks.begin * m + rows.panels.first_row(panel);
  const char* tile = weight.tile(block, first);
  int64_t left = blocks(k, Format::kTileInputs) - first;
  for (int64_t k_block = k_blocks.begin; k_block < k_blocks.end; ++k_block, input_sums += m) {
    const int64_t tiles = std::min(weight.k_block_tiles, left), ahead = requests.at(k_block);
    const KBlockScale scale(weight, block, k_block);
    weight.fetch_scales(block, k_block + 8);
    if constexpr (R <= kRowsOfTwoKBlocks<Format>) {
      if (k_block + 1 < k_blocks.end && left >= 2 * tiles) {
        const KBlockScale next_scale(weight, block, ++k_block);
        weight.fetch_scales(block, k_block + 8);
        add_two_k_blocks<R>(x, tile, tiles, ahead, scale, next_scale, input_sums, m, totals);
        left -= 2 * tiles, tile += 4 * tiles * Format::kPackedTile, x += 2 * tiles * R * kUnitsOfTile<Format>,
            input_sums += m;
        continue;
      }
    }
    if constexpr (R <= kRowsInOrder) {
      add_k_block<R>(x, tile, tiles, ahead, scale, input_sums, totals);
    } else {
      add_k_block_apart<R>(x, tile, tiles, ahead, scale, input_sums, totals);
    }
    left -= tiles, tile += tiles * 2 * Format::kPackedTile, x += tiles * R * kUnitsOfTile<Format>;
  }
}

// Cache blocking: the inputs of a stripe over a part of k, and its totals with a band of blocks, stay in the L2 cache.
constexpr int64_t kStripeRows = kLanes == 16 ? 252 : 192, kBandBlocks = 8;
template <class Format>
constexpr int64_t kStripePanels = kLanes == 16 ? 18 : kStripeRows / Format::kMostRows;
constexpr int64_t kBandInputs = 384;

constexpr int64_t kPieceTiles = 4;  // tiles that are expanded at a time

// A thread's scratch memory.
struct BlockScaledScratch {
#ifndef TR_BF16
  alignas(64) float tiles[kPieceTiles * 2 * kTile];  // expanded tiles
  float partial[kStripeRows * kBlockN];              // sums of K-blocks that are longer than a piece
#endif
  float totals[kBandBlocks * kStripeRows * kBlockN];
};

// work.totals[block][row][32] = the panels `chosen` x a band of blocks, part by part of k. With one panel the weight is
// prefetched at a fixed distance; with several, each panel prefetches its share of the next block.
template <class Format>
static void multiply_band_of_codes(const BlockScaledRows& rows, Range chosen, const Format& weight, Range band,
                                   int64_t k, BlockScaledScratch& work) {
  const RowPanels<bf16>& panels = rows.panels;
  const int64_t first_row = panels.first_row(chosen.begin), count = panels.first_row(chosen.end) - first_row;
  std::fill_n(work.totals, (band.end - band.begin) * count * kBlockN, 0.0f);
  const int64_t step = rows.few ? weight.k_blocks : panels.part / (weight.k_block_tiles * kUnitsOfTile<Format>);
  const auto k_block_at = [&](int64_t block, int64_t k_block) {
    return weight.tile(block, k_block * weight.k_block_tiles);
  };
  for (Range k_blocks{0, 0}; k_blocks.begin < weight.k_blocks; k_blocks.begin = k_blocks.end) {
    k_blocks.end = std::min(k_blocks.begin + step, weight.k_blocks);
    for (int64_t block = band.begin; block < band.end; ++block) {
      const char* const next =
          block + 1 < band.end ? k_block_at(block + 1, k_blocks.begin) : k_block_at(band.begin, k_blocks.end);
      const int64_t to_next = next - k_block_at(block, k_blocks.begin);
      for (int64_t panel = chosen.begin; panel < chosen.end; ++panel) {
        const int64_t to = ((block - band.begin) * count + panels.first_row(panel) - first_row) * kBlockN;
        for_rows<std::min<int64_t>(Format::kMostRows, Format::kFewRows)>(panels.rows(panel), [&](auto r) {
          constexpr int64_t kAhead = r <= kRowsOfTwoKBlocks<Format> ? 8 << 10 : 3 << 10;
          const PanelPrefetch in_stream{in_order<r, Format> && follows_streams() ? 0 : kAhead};
          const PanelPrefetch shared{to_next, panel - chosen.begin, chosen.end - chosen.begin};
          const PanelPrefetch requests = rows.few && panels.panels == 1 ? in_stream : shared;
          multiply_codes<r>(rows, panel, weight, block, k_blocks, k, requests, work.totals + to);
        });
      }
    }
  }
}

#ifndef TR_BF16
#include "block_scaled/block_scaled_expanded-inl.h"
#endif

// Computes the results `own` of the panels `chosen`. A result takes kParts consecutive blocks of the weight. emit(row,
// result, const float* const (&totals)[kParts]) receives the totals of each row. memory: a BlockScaledScratch
template <int kParts, class Format, class Emit>
static void multiply_results(const BlockScaledRows& rows, Range chosen, const Format& weight, Range own, int64_t k,
                             void* memory, const Emit& emit) {
  BlockScaledScratch& work = *static_cast<BlockScaledScratch*>(memory);
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
