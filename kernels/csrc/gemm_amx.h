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

// Not _mm_prefetch: GCC takes a function that does nothing else for one without effect, and drops its calls.
static inline void prefetch_l2(const char* p) { asm volatile("prefetcht1 %0" ::"m"(*p)); }
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
// weight pass by. The inputs are cut in panels, so that the weight's panel of a block (32 KiB) stays in the first level
// while the stripe's rows pass by it, past that cache. Between panels sums wait in memory: those of one block if all
// panels of the stripe fit in the second level; else those of a band of blocks, and the stripe comes panel by panel.
// One pair of row tiles reads the weight in order, as it comes from memory. The sizes were found by trying.
struct Blocking {
  int64_t panel;   // tiles of 64 bytes of inputs
  int64_t stripe;  // tiles of 16 rows
  int64_t band;    // blocks of 32 outputs

  static Blocking of(int64_t row_tiles, int64_t k_tiles) {
    constexpr int64_t kPanel = 16, kResident = 1280, kTall = 24;  // k tiles, tiles (1 KiB) of a stripe, row tiles
    if (row_tiles <= 2) return {k_tiles, 2, 1};
    const int64_t whole = kResident / k_tiles / 2 * 2;
    if (whole >= std::min(row_tiles, kTall)) return {kPanel, std::min<int64_t>(whole, 64), 1};
    return {kPanel, 32, 16};
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

// Where the row tiles of a product are: packed, but for the first ones, if these can be read from x itself. They can
// where the distance of its rows is an odd number of cache lines: else the rows of a tile meet in the same few sets of
// the caches.
struct RowTiles {
  struct Place {
    const char* data;
    int64_t row_stride, tile_step, second;  // bytes between rows, tiles of k, and to the next row tile
  };

  PackedRows packed;  // of the row tiles from plain_tiles on
  const char* x = nullptr;
  int64_t x_stride = 0, plain_tiles = 0;  // bytes

  RowTiles(const PackedRows& packed) : packed(packed) {}
  RowTiles(const PackedRows& packed, const char* x, int64_t x_stride, int64_t plain_tiles)
      : packed(packed), x(x), x_stride(x_stride), plain_tiles(plain_tiles) {}

  bool plain(int64_t row_tile) const { return row_tile < plain_tiles; }
  Place at(int64_t panel, int64_t row_tile) const {
    const char* const row = x + row_tile * kTileRows * x_stride;
    if (plain(row_tile)) return {row + panel * packed.panel * 64, x_stride, 64, kTileRows * x_stride};
    return {packed.tiles(panel, row_tile - plain_tiles), 64, kTileBytes, packed.panel_tiles(panel) * kTileBytes};
  }
};

// Memory that is needed soon: `bytes` of it at every step, in one piece, or in rows of kRow bytes, of which `bytes` are
// a whole part.
struct Ahead {
  static constexpr int64_t kRow = 1024;
  const char* data;
  int64_t bytes, done = 0, gap = 0;  // done: of the row; gap: between rows

  // From the byte number `first` on.
  static Ahead from(const char* data, int64_t first, int64_t bytes, int64_t row_stride) {
    return {data + first / kRow * row_stride + first % kRow, bytes, first % kRow, row_stride - kRow};
  }
};

// The tiles that a Pass uses, for row tiles of `rows` rows.
static inline TileConfig panel_tiles(int64_t rows) {
  TileConfig config;
  for (int tile = 0; tile < 6; ++tile) config.set(tile, static_cast<int>(std::min(rows, kTileRows)), 64);
  for (int tile = 6; tile < 8; ++tile) config.set(tile, kTileRows, 64);
  return config;
}

// f(row, i) for every row of `rows`: where among sums that begin with the first of them its first 16 columns are; the
// rest is a tile on.
template <class F>
static inline void for_sums(Range rows, const F& f) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t r = row - rows.begin;
    f(row, (r / kTileRows * 2 * kTileRows + r % kTileRows) * kLanes);
  }
}

constexpr int64_t kPairSums = 4 * kTileRows * kLanes;  // of two row tiles with a block: two tiles for each

// Floats that multiply_stripe wants for sums.
template <int kParts>
static int64_t band_sums(const PackedRows&, const Blocking& blocking) {
  return kPairSums * (blocks(blocking.stripe, 2) * std::max<int64_t>(blocking.band, kParts) + 1);
}

// The sums of a pass that are still in the tiles.
struct InTiles {
  float* to;
  int row_tiles;  // 0: none

  template <int T>
  void store() const {
    if (T / 2 < row_tiles) tile_store<T>(to + T * kTileRows * kLanes, 64);
  }
  void store_all() const {
    store<0>();
    store<1>();
    store<2>();
    store<3>();
  }
};

// A pair of row tiles, or one, times one panel of a block of the weight. The sums stay in the tiles: the next pass
// stores each just before it needs the tile, when its own operands are on the way, so that products hardly pause.
struct Pass {
  RowTiles::Place rows;
  const char* weight;
  int64_t k_tiles;
  const float* from;  // the sums so far; null: none
  const float* next;  // null, or where the sums of the next pass are, or will be
  const Ahead weights_ahead, rows_ahead;

  // meanwhile() is called at every step but the first: what it does costs little, because the tiles have their own
  // work. kWeightStays: the weight's panel is used again by the next rows and stays in the first-level cache; so that
  // it does, rows are loaded past it.
  template <class Dot, int kRowTiles, bool kWeightStays, class F>
  void run(const InTiles& before, const F& meanwhile) const {
    const char *rows0 = rows.data, *rows1 = rows.data + rows.second, *w = weight;
    // In few instructions: what they displace is the processor's view of the loads to come.
    const char *w_ahead = weights_ahead.data, *rows_next = rows_ahead.data;
    int64_t row_done = rows_ahead.done;
    const auto fetch_ahead = [&]() __attribute__((always_inline)) {
      for (const char* const end = w_ahead + weights_ahead.bytes; w_ahead != end; w_ahead += 64) prefetch_l2(w_ahead);
      for (const char* const end = rows_next + rows_ahead.bytes; rows_next != end; rows_next += 64) {
        prefetch_l2(rows_next);
      }
      row_done += rows_ahead.bytes;
      if (row_done % Ahead::kRow == 0) rows_next += rows_ahead.gap;
    };
    const auto load_operands = [&] {
      load<4, !kWeightStays>(rows0, rows.row_stride);
      load<6, kWeightStays>(w, 64);
      load<7, kWeightStays>(w + kTileBytes, 64);
      if (kRowTiles == 2) load<5, !kWeightStays>(rows1, rows.row_stride);
      rows0 += rows.tile_step;
      rows1 += rows.tile_step;
      w += kBlockStep;
    };
    fetch_ahead();
    load_operands();
    begin<0>(before);
    Dot::template run<0, 4, 6>();
    begin<1>(before);
    Dot::template run<1, 4, 7>();
    if constexpr (kRowTiles == 2) {
      begin<2>(before);
      Dot::template run<2, 5, 6>();
      begin<3>(before);
      Dot::template run<3, 5, 7>();
    } else {
      before.store<2>();
      before.store<3>();
    }
    for (int64_t t = 1; t < k_tiles; ++t) {
      load_operands();
      Dot::template run<0, 4, 6>();
      Dot::template run<1, 4, 7>();
      fetch_ahead();
      if (next && t <= 16) {
        for (int64_t line = t * 4 - 4; line < t * 4; ++line) prefetch_write(next + line * 16);
      }
      meanwhile();
      if constexpr (kRowTiles == 2) {
        Dot::template run<2, 5, 6>();
        Dot::template run<3, 5, 7>();
      }
    }
  }

 private:
  template <int T>
  void begin(const InTiles& before) const {
    before.store<T>();
    if (from) {
      tile_load<T>(from + T * kTileRows * kLanes, 64);
    } else {
      tile_zero<T>();
    }
  }

  template <int T, bool kStays>
  static void load(const char* p, int64_t row_stride) {
    if constexpr (kStays) {
      tile_load<T>(p, row_stride);
    } else {
      tile_load_stream<T>(p, row_stride);
    }
  }
};

// Finished sums whose rows are handed to finish.write one by one, while the next products run.
template <int kParts, class Finish>
struct Unfinished {
  const Finish* finish;
  Range rows{0, 0};
  int64_t result = 0;
  const float* parts[kParts] = {};
  int64_t done = 0;  // rows

  void row() {
    const int64_t i = (done + (done & -kTileRows)) * kLanes;  // two tiles for 16 rows
    const float* sums[kParts];
    for (int part = 0; part < kParts; ++part) sums[part] = parts[part] + i;
    finish->write(sums, {rows.begin + done, rows.begin + done + 1}, result);
    ++done;
  }
  bool any() const { return rows.begin + done < rows.end; }
  void all() {
    while (any()) row();
  }
};

// What a band leaves to be done during the first products of the next.
template <int kParts, class Finish>
struct Left {
  Unfinished<kParts, Finish> unfinished;
  InTiles in_tiles{nullptr, 0};
};

// The sums of a stripe of rows x a band of blocks, of whole results, panel by panel. Nothing comes after the last band.
template <class Dot, int kParts, class Finish>
static void multiply_band(const RowTiles& row_tiles, Range stripe, const char* weight, Range band, int64_t m,
                          float* sums, bool last_band, Left<kParts, Finish>& left) {
  const PackedRows& rows = row_tiles.packed;
  const int64_t pairs = blocks(stripe.end - stripe.begin, 2), panels = blocks(rows.k_tiles, rows.panel);
  const int64_t width = band.end - band.begin;
  float *const last = sums, *const kept = sums + kPairSums;  // finished sums; those of the band
  const auto panel_of = [&](int64_t block, int64_t panel) {
    return weight + (block * rows.k_tiles + panel * rows.panel) * kBlockStep;
  };
  const int64_t w_bytes = blocks(kBlockStep / 64, pairs) * 64;
  // The rows' next panel. Packed ones are fast to read: asked for during the second half of a band, fewer of them lose
  // their place in the second-level cache again.
  const bool plain = row_tiles.plain(stripe.begin);
  int64_t step_bytes = plain ? 64 : 128;
  while (step_bytes * width < kBlockStep * (plain ? 1 : 2)) step_bytes *= 2;
  const int64_t asks_from = plain ? 0 : width / 2 * pairs, asks = kBlockStep / step_bytes * pairs;  // passes
  Unfinished<kParts, Finish> unfinished = left.unfinished;
  const auto meanwhile = [&] {
    for (int i = 0; i < 2 && unfinished.any(); ++i) unfinished.row();
  };
  InTiles before = left.in_tiles;
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t k_tiles = rows.panel_tiles(panel);
    const RowTiles::Place next_rows = row_tiles.at(panel + 1 < panels ? panel + 1 : 0, stripe.begin);
    const int64_t next_stride = plain ? next_rows.row_stride : Ahead::kRow;
    const bool asks_rows = width > kParts && !(last_band && panel + 1 == panels);
    for (int64_t block = band.begin; block < band.end; ++block) {
      const char* const w = panel_of(block, panel);
      const char* const next_w = block + 1 < band.end ? panel_of(block + 1, panel)
                                 : panel + 1 < panels ? panel_of(band.begin, panel + 1)
                                                      : panel_of(band.end, 0);
      const bool finishes = panel + 1 == panels && block % kParts == kParts - 1;
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t tile = stripe.begin + pair * 2, passed = (block - band.begin) * pairs + pair;
        float* const own = kept + passed * kPairSums;
        // What is needed next comes to the second-level cache bit by bit: the next panel of the weight, and that of the
        // rows in the course of a band. With few rows the weight streams from memory.
        const Ahead ahead_w =
            pairs > 1 ? Ahead{next_w + pair * k_tiles * w_bytes, w_bytes} : Ahead{w + kStreamAhead, kBlockStep};
        const int64_t asked = passed - asks_from;
        const int64_t row_bytes = asks_rows && 0 <= asked && asked < asks ? step_bytes : 0;
        const Pass pass{row_tiles.at(panel, tile),
                        w,
                        k_tiles,
                        panel ? own : nullptr,
                        panel || width > kParts ? own + kPairSums : nullptr,
                        ahead_w,
                        Ahead::from(next_rows.data, asked * k_tiles * row_bytes, row_bytes, next_stride)};
        if (pairs == 1) {
          tile + 1 < stripe.end ? pass.run<Dot, 2, false>(before, meanwhile)
                                : pass.run<Dot, 1, false>(before, meanwhile);
        } else {
          tile + 1 < stripe.end ? pass.run<Dot, 2, true>(before, meanwhile) : pass.run<Dot, 1, true>(before, meanwhile);
        }
        before = {finishes ? last : own, tile + 1 < stripe.end ? 2 : 1};
        unfinished.all();
        if (!finishes) continue;
        unfinished.rows = {tile * kTileRows, std::min({(tile + 2) * kTileRows, stripe.end * kTileRows, m})};
        unfinished.result = block / kParts;
        unfinished.done = 0;
        if (kParts == 2) unfinished.parts[0] = own - pairs * kPairSums;
        unfinished.parts[kParts - 1] = last;
      }
    }
  }
  left = {unfinished, before};
}

// The products of a stripe of rows with the blocks of `results`, in bands. A result takes kParts consecutive blocks (2:
// a gate and what it is for). finish.write(parts, rows, result) gets the sums of each part, in tiles: two side by side
// for each of the row tiles that `rows` begins and ends in (`for_sums`). Nothing comes after the last stripe.
template <class Dot, int kParts, class Finish>
static void multiply_stripe(const RowTiles& row_tiles, Range stripe, const char* weight, Range results,
                            const Blocking& blocking, int64_t m, float* sums, const Finish& finish,
                            bool last_stripe = false) {
  const int64_t end = results.end * kParts, step = std::max<int64_t>(blocking.band, kParts);
  Left<kParts, Finish> left{{&finish}};
  for (int64_t block = results.begin * kParts; block < end; block += step) {
    const Range band{block, std::min(block + step, end)};
    multiply_band<Dot, kParts>(row_tiles, stripe, weight, band, m, sums, last_stripe && band.end == end, left);
  }
  left.in_tiles.store_all();
  left.unfinished.all();
}

}  // namespace tilerank::TR_RUNG
