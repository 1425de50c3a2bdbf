// Products of packed rows with blocks of a packed weight in AMX tiles, for the *_amx.cpp that includes this file.
#pragma once
#include "amx.h"

namespace tilerank::TR_RUNG {

// Every sum runs over k in tiles of 32 in order, in one chain (through memory between panels, which is exact), whatever
// the number of rows: a row's bits do not depend on its batch.

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kBlockStep = 2 * kTileBytes;  // of a packed weight block, for 32 inputs

constexpr int64_t kStreamAhead = 16 << 10;  // bytes of a weight that is read in order

static inline void prefetch_l2(const char* p) { _mm_prefetch(p, _MM_HINT_T1); }
static inline void prefetch_write(const void* p) { asm volatile("prefetchw %0" ::"m"(*static_cast<const char*>(p))); }

// Pairs of bf16 summed in fp32, or fours of bytes in int32: tiles of 64 bytes of a row's inputs, and as many sums.
struct Bf16Dot {
  template <int C, int A, int B>
  static void run() {
    tile_dot_bf16<C, A, B>();
  }
};
struct Int8Dot {
  template <int C, int A, int B>
  static void run() {
    tile_dot_int8<C, A, B>();
  }
};

// How many rows are multiplied: a stripe of activations (row tiles) stays in the second-level cache while blocks of the
// weight pass by. If whole rows of a tall enough stripe fit there, sums stay in tiles from the first to the last input.
// Otherwise the inputs are cut in panels: the weight's panel of a block (16 KiB) stays in the first level, the stripe's
// panel (192 KiB) and its sums over a band of blocks (576 KiB) in the second. The sizes were found by trying.
struct Blocking {
  int64_t panel;   // tiles of 32 inputs
  int64_t stripe;  // tiles of 16 rows
  int64_t band;    // blocks of 32 outputs

  static Blocking of(int64_t row_tiles, int64_t k_tiles) {
    constexpr int64_t kResident = 768, kTall = 16;  // tiles (1 KiB) of a stripe, row tiles
    const int64_t whole = kResident / k_tiles / 2 * 2;
    if (whole >= std::min(row_tiles, kTall)) return {k_tiles, whole, 1};
    return {8, 24, 12};
  }
};

// Activations in tiles, inputs padded with zeros, rows with anything: [panels][row tiles][tiles of the panel][16
// rows][32 inputs], so that what is used together is one piece of memory.
struct PackedRows {
  char* data;
  int64_t row_tiles, k_tiles, panel;

  int64_t panel_tiles(int64_t p) const { return std::min(panel, k_tiles - p * panel); }
  char* tiles(int64_t p, int64_t row_tile) const {
    return data + (p * panel * row_tiles + row_tile * panel_tiles(p)) * kTileBytes;
  }
};

// Tiles `tiles` of the k inputs of row `r` of a row tile.
static inline void pack_row(const bf16* from, int64_t k, const PackedRows& to, int64_t row_tile, int64_t r,
                            Range tiles) {
  for (int64_t t = tiles.begin; t < tiles.end; ++t) {
    const __mmask32 mask = static_cast<__mmask32>((uint64_t{1} << std::min(kBlockK, k - t * kBlockK)) - 1);
    _mm512_store_si512(to.tiles(t / to.panel, row_tile) + t % to.panel * kTileBytes + r * 64,
                       _mm512_maskz_loadu_epi16(mask, from + t * kBlockK));
  }
}

// Memory that is needed soon: `lines` cache lines of it at every step.
struct Ahead {
  const char* data;
  int64_t lines;

  void fetch(int64_t step) const {
    for (int64_t i = 0; i < lines; ++i) prefetch_l2(data + (step * lines + i) * 64);
  }
};

// sums (+)= rows x weight over one panel: kRowTiles x 2 tiles of sums, 1 KiB each, one after the other.
template <class Dot, int kRowTiles>
static inline void multiply_panel(const char* rows0, const char* rows1, const char* w, int64_t k_tiles, bool first,
                                  float* sums, const Ahead& weights, const Ahead& rows) {
  if (first) {
    tile_zero<0>();
    tile_zero<1>();
    if (kRowTiles == 2) tile_zero<2>();
    if (kRowTiles == 2) tile_zero<3>();
  } else {
    tile_load<0>(sums, 64);
    tile_load<1>(sums + 256, 64);
    if (kRowTiles == 2) tile_load<2>(sums + 512, 64);
    if (kRowTiles == 2) tile_load<3>(sums + 768, 64);
  }
  for (int64_t t = 0; t < k_tiles; ++t) {
    weights.fetch(t);
    rows.fetch(t);
    tile_load<4>(rows0 + t * kTileBytes, 64);
    tile_load<6>(w + t * kBlockStep, 64);
    Dot::template run<0, 4, 6>();
    tile_load<7>(w + t * kBlockStep + kTileBytes, 64);
    Dot::template run<1, 4, 7>();
    if (kRowTiles == 2) {
      tile_load<5>(rows1 + t * kTileBytes, 64);
      Dot::template run<2, 5, 6>();
      Dot::template run<3, 5, 7>();
    }
  }
  tile_store<0>(sums, 64);
  tile_store<1>(sums + 256, 64);
  if (kRowTiles == 2) tile_store<2>(sums + 512, 64);
  if (kRowTiles == 2) tile_store<3>(sums + 768, 64);
}

// The tiles that multiply_panel uses, for row tiles of `rows` rows.
static inline TileConfig panel_tiles(int64_t rows) {
  TileConfig config;
  for (int tile = 0; tile < 6; ++tile) config.set(tile, static_cast<int>(std::min(rows, kTileRows)), 64);
  for (int tile = 6; tile < 8; ++tile) config.set(tile, kTileRows, 64);
  return config;
}

constexpr int64_t kPairSums = 4 * kTileRows * kLanes;  // of two row tiles with a block

// Floats that multiply_band wants for sums.
template <int kParts>
static int64_t band_sums(const PackedRows& rows, const Blocking& blocking) {
  const bool kept = rows.panel < rows.k_tiles || kParts > 1;
  return kPairSums * (kept ? blocks(blocking.stripe, 2) * std::max<int64_t>(blocking.band, kParts) : 1);
}

// The sums of a stripe of rows x a band of blocks, panel by panel. A result takes kParts consecutive blocks (2: a gate
// and what it is for), and the band whole results. finish.write(parts, rows, result) gets the sums of each part, in
// tiles: two side by side for each of the one or two row tiles; finish.prefetch(rows, result) comes before.
template <class Dot, int kParts, class Finish>
static void multiply_band(const PackedRows& rows, Range stripe, const char* weight, Range band, int64_t m, float* sums,
                          const Finish& finish) {
  const int64_t pairs = blocks(stripe.end - stripe.begin, 2), panels = blocks(rows.k_tiles, rows.panel);
  const auto panel_of = [&](int64_t block, int64_t panel) {
    return weight + (block * rows.k_tiles + panel * rows.panel) * kBlockStep;
  };
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t k_tiles = rows.panel_tiles(panel);
    for (int64_t block = band.begin; block < band.end; ++block) {
      const char* const w = panel_of(block, panel);
      const char* const next_w = block + 1 < band.end ? panel_of(block + 1, panel)
                                 : panel + 1 < panels ? panel_of(band.begin, panel + 1)
                                                      : panel_of(band.end, 0);
      const char* const next_rows = rows.tiles(panel + 1 < panels ? panel + 1 : 0, stripe.begin);
      const int64_t w_lines = blocks(kBlockStep / 64, pairs);
      const int64_t row_lines = panels > 1 ? blocks(kBlockStep / 64, band.end - band.begin) : 0;
      const bool last = panel + 1 == panels && block % kParts == kParts - 1;
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t tile = stripe.begin + pair * 2;
        const auto sums_of = [&](int64_t b) {
          return sums + (panels > 1 || kParts > 1 ? ((b - band.begin) * pairs + pair) * kPairSums : 0);
        };
        const char* const rows0 = rows.tiles(panel, tile);
        // Few rows: the weight streams from memory. More: the next block is fetched bit by bit while this one is used.
        const Ahead ahead_w = pairs > 1 ? Ahead{next_w + pair * k_tiles * w_lines * 64, w_lines}
                                        : Ahead{w + kStreamAhead, kBlockStep / 64};
        const Ahead ahead_rows{next_rows + ((block - band.begin) * pairs + pair) * k_tiles * row_lines * 64, row_lines};
        const Range range{tile * kTileRows, std::min({(tile + 2) * kTileRows, stripe.end * kTileRows, m})};
        if (last) finish.prefetch(range, block / kParts);
        if (tile + 1 < stripe.end) {
          multiply_panel<Dot, 2>(rows0, rows0 + k_tiles * kTileBytes, w, k_tiles, panel == 0, sums_of(block), ahead_w,
                                 ahead_rows);
        } else {
          multiply_panel<Dot, 1>(rows0, nullptr, w, k_tiles, panel == 0, sums_of(block), ahead_w, ahead_rows);
        }
        if (last) {
          const float* parts[kParts];
          for (int part = 0; part < kParts; ++part) parts[part] = sums_of(block - kParts + 1 + part);
          finish.write(parts, range, block / kParts);
        }
      }
    }
  }
}

// f(row, i) for every row of `rows`: where among the sums of a pair its first 16 columns are; the rest is a tile on.
template <class F>
static inline void for_sums(Range rows, const F& f) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t r = row - rows.begin;
    f(row, (r / kTileRows * 2 * kTileRows + r % kTileRows) * kLanes);
  }
}

}  // namespace tilerank::TR_RUNG
