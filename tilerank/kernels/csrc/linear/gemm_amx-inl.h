// The AMX micro-kernels of many rows: products of packed rows with blocks of a packed weight.
#pragma once
#include "simd/amx-inl.h"

namespace tilerank::TR_RUNG {

// Every sum accumulates over k tile by tile, in order, in one chain. Between panels of k it is stored in memory, which
// is exact. The order does not depend on the number of rows, so neither do the bits of a row.

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kBlockStep = 2 * kTileBytes;  // bytes of a weight block for the inputs of one tile

constexpr int64_t kStreamAhead = 16 << 10;  // prefetch distance in bytes, for a weight that is read once

// Inline assembly instead of _mm_prefetch: GCC considers a function that only prefetches free of effects and drops
// calls to it.
static inline void prefetch_l2(const char* p) { asm volatile("prefetcht1 %0" ::"m"(*p)); }
static inline void prefetch_write(const void* p) { asm volatile("prefetchw %0" ::"m"(*static_cast<const char*>(p))); }

// C += A * B on tiles: pairs of bf16 summed in fp32, or quads of int8 with quads of uint8 summed in int32.
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

// Cache blocking. A stripe of row tiles stays in the L2 cache while all blocks of the weight are multiplied with it. k
// is split into panels, so that one panel of a weight block (32 KiB) stays in the L1 cache while the stripe's rows,
// which are loaded with a non-temporal hint, pass by it. Between panels, sums are kept in memory: those of one block if
// the whole stripe fits in L2; otherwise those of a band of blocks, and the stripe is read panel by panel. With at most
// two row tiles the weight is read in order. The sizes are tuned by measurement.
struct Blocking {
  int64_t panel;   // K-tiles, 64 bytes of a row's inputs each
  int64_t stripe;  // row tiles, 16 rows each
  int64_t band;    // blocks of 32 outputs

  static Blocking of(int64_t row_tiles, int64_t k_tiles) {
    constexpr int64_t kPanel = 16, kResident = 1280, kTall = 24;  // k tiles, tiles (1 KiB) of a stripe, row tiles
    if (row_tiles <= 2) return {k_tiles, 2, 1};
    const int64_t whole = kResident / k_tiles / 2 * 2;
    if (whole >= std::min(row_tiles, kTall)) return {kPanel, std::min<int64_t>(whole, 64), 1};
    return {kPanel, 32, 16};
  }
};

// Activations packed in tiles: [panels][row tiles][K-tiles of the panel][16 rows][32 inputs], so that a pass reads
// contiguous memory. Inputs are padded with zeros; rows of padding have undefined contents.
struct PackedRows {
  char* data;
  int64_t row_tiles, k_tiles, panel;

  int64_t panel_tiles(int64_t p) const { return std::min(panel, k_tiles - p * panel); }
  char* tiles(int64_t p, int64_t row_tile) const {
    return data + (p * panel * row_tiles + row_tile * panel_tiles(p)) * kTileBytes;
  }
};

// Packs the K-tiles `tiles` of row r of a row tile; `from` has k inputs.
static inline void pack_row(const bf16* from, int64_t k, const PackedRows& to, int64_t row_tile, int64_t r,
                            Range tiles) {
  for (int64_t t = tiles.begin; t < tiles.end; ++t) {
    copy_line(to.tiles(t / to.panel, row_tile) + t % to.panel * kTileBytes + r * 64, from + t * kTileK,
              std::min(kTileK, k - t * kTileK));
  }
}

// Packs the K-tiles `tiles` of row tile `row_tile` of x[m, k].
static inline void pack_row_tile(const Tensor& x, const PackedRows& to, int64_t row_tile, Range tiles) {
  const int64_t k = x.size[1], count = std::min(kTileRows, x.size[0] - row_tile * kTileRows);
  for (int64_t t = tiles.begin; t < tiles.end; ++t) {
    for (int64_t r = 0; r < count; ++r) {
      pack_row(x.row<const bf16>(row_tile * kTileRows + r), k, to, row_tile, r, {t, t + 1});
    }
  }
}

// Locates the row tiles of a product. The first plain_tiles are read from x itself, the others are packed. Reading from
// x pays if its rows are an odd number of cache lines apart; otherwise the rows of a tile fall into the same few cache
// sets.
struct RowTiles {
  struct Place {
    const char* data;
    int64_t row_stride, tile_step, second;  // bytes between rows, between K-tiles, and to the next row tile
  };

  PackedRows packed;  // the row tiles from plain_tiles on
  const char* x = nullptr;
  int64_t x_stride = 0, plain_tiles = 0;  // x_stride in bytes

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

// Memory to prefetch into L2, `bytes` at every step. It is contiguous, or consists of rows of kRow bytes with a gap
// between them; `bytes` divides kRow.
struct TilePrefetch {
  static constexpr int64_t kRow = 1024;
  const char* data;
  int64_t bytes, done = 0, gap = 0;  // done: bytes of the current row; gap: bytes between rows

  // Starts at byte `first` of rows that are row_stride apart.
  static TilePrefetch from(const char* data, int64_t first, int64_t bytes, int64_t row_stride) {
    return {data + first / kRow * row_stride + first % kRow, bytes, first % kRow, row_stride - kRow};
  }
};

// The shapes of tiles for products of row tiles of at most `rows` rows: the first `of_rows` tiles hold rows or sums.
static inline TileConfig tile_shapes(int64_t rows, int of_rows) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.set(tile, static_cast<int>(tile < of_rows ? std::min(rows, kTileRows) : kTileRows), 64);
  }
  return config;
}

// The tile configuration of a Pass with row tiles of `rows` rows.
static inline TileConfig panel_tiles(int64_t rows) { return tile_shapes(rows, 6); }

// Calls f(row, i) for every row of `rows`. i is the index of the row's first 16 columns among sums that begin with the
// first of the rows; its other 16 columns are one tile further.
template <class F>
static inline void for_sums(Range rows, const F& f) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t r = row - rows.begin;
    f(row, (r / kTileRows * 2 * kTileRows + r % kTileRows) * kLanes);
  }
}

constexpr int64_t kPairSums = 4 * kTileRows * kLanes;  // sums of two row tiles with a block: two tiles for each

// The number of floats of the buffer `sums` of multiply_stripe.
template <int kParts>
static int64_t band_sums(const PackedRows&, const Blocking& blocking) {
  return kPairSums * (blocks(blocking.stripe, 2) * std::max<int64_t>(blocking.band, kParts) + 1);
}

// The sums of a pass that are still in tile registers, and where they will be stored.
struct InTiles {
  float* to;
  int row_tiles;  // 0: no sums

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

// Multiplies one or two row tiles with one panel of a weight block. The sums remain in the tiles; the next pass stores
// each tile just before it reuses it, while its own operands are being loaded, so that products hardly stall.
struct Pass {
  RowTiles::Place rows;
  const char* weight;
  int64_t k_tiles;
  const float* from;  // the sums so far; null: start from zero
  const float* next;  // the sums of the next pass, to prefetch for writing, or null
  const TilePrefetch weights_ahead, rows_ahead;

  // Calls meanwhile() at every step but the first; its vector instructions overlap with the tile products.
  // kWeightStays: the next rows reuse the weight's panel, so it is kept in L1, and rows are loaded with a non-temporal
  // hint in order not to displace it.
  template <class Dot, int kRowTiles, bool kWeightStays, class F>
  void run(const InTiles& before, const F& meanwhile) const {
    const char *rows0 = rows.data, *rows1 = rows.data + rows.second, *w = weight;
    // Few instructions: more would fill the reorder buffer and hide the coming loads from the processor.
    const char *w_ahead = weights_ahead.data, *rows_next = rows_ahead.data;
    int64_t row_done = rows_ahead.done;
    const auto fetch_ahead = [&]() __attribute__((always_inline)) {
      for (const char* const end = w_ahead + weights_ahead.bytes; w_ahead != end; w_ahead += 64) prefetch_l2(w_ahead);
      for (const char* const end = rows_next + rows_ahead.bytes; rows_next != end; rows_next += 64) {
        prefetch_l2(rows_next);
      }
      row_done += rows_ahead.bytes;
      if (row_done % TilePrefetch::kRow == 0) rows_next += rows_ahead.gap;
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

// Complete sums that wait for their epilogue: finish.write is called row by row, while the next products run.
template <int kParts, class Finish>
struct PendingRows {
  const Finish* finish;
  Range rows{0, 0};
  int64_t result = 0;
  const float* parts[kParts] = {};
  int64_t done = 0;  // rows written

  void row() {
    const int64_t i = (done + (done & -kTileRows)) * kLanes;  // 16 rows have two tiles
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

// Work that a band leaves to overlap with the first products of the next band.
template <int kParts, class Finish>
struct Deferred {
  PendingRows<kParts, Finish> unfinished;
  InTiles in_tiles{nullptr, 0};
};

// Multiplies a stripe of rows with a band of blocks, panel by panel. The band consists of whole results. After the last
// band nothing is prefetched.
template <class Dot, int kParts, class Finish>
static void multiply_band(const RowTiles& row_tiles, Range stripe, const char* weight, Range band, int64_t m,
                          float* sums, bool last_band, Deferred<kParts, Finish>& left) {
  const PackedRows& rows = row_tiles.packed;
  const int64_t pairs = blocks(stripe.end - stripe.begin, 2), panels = blocks(rows.k_tiles, rows.panel);
  const int64_t width = band.end - band.begin;
  float *const last = sums, *const kept = sums + kPairSums;  // complete sums of a pass; sums of the band
  const auto panel_of = [&](int64_t block, int64_t panel) {
    return weight + (block * rows.k_tiles + panel * rows.panel) * kBlockStep;
  };
  const int64_t w_bytes = blocks(kBlockStep / 64, pairs) * 64;
  // Prefetch of the rows' next panel. Packed rows are fast to read, so their prefetch is spread over the second half of
  // the band only: fewer lines are evicted from L2 before they are used.
  const bool plain = row_tiles.plain(stripe.begin);
  int64_t step_bytes = plain ? 64 : 128;
  while (step_bytes * width < kBlockStep * (plain ? 1 : 2)) step_bytes *= 2;
  const int64_t fetch_from = plain ? 0 : width / 2 * pairs, fetches = kBlockStep / step_bytes * pairs;  // passes
  PendingRows<kParts, Finish> unfinished = left.unfinished;
  const auto meanwhile = [&] {
    for (int i = 0; i < 2 && unfinished.any(); ++i) unfinished.row();
  };
  InTiles before = left.in_tiles;
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t k_tiles = rows.panel_tiles(panel);
    const RowTiles::Place next_rows = row_tiles.at(panel + 1 < panels ? panel + 1 : 0, stripe.begin);
    const int64_t next_stride = plain ? next_rows.row_stride : TilePrefetch::kRow;
    const bool fetches_rows = width > kParts && !(last_band && panel + 1 == panels);
    for (int64_t block = band.begin; block < band.end; ++block) {
      const char* const w = panel_of(block, panel);
      const char* const next_w = block + 1 < band.end ? panel_of(block + 1, panel)
                                 : panel + 1 < panels ? panel_of(band.begin, panel + 1)
                                                      : panel_of(band.end, 0);
      const bool finishes = panel + 1 == panels && block % kParts == kParts - 1;
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t tile = stripe.begin + pair * 2, passed = (block - band.begin) * pairs + pair;
        float* const own = kept + passed * kPairSums;
        // Prefetch in small portions into L2: the next panel of the weight, and over the course of a band the next
        // panel of the rows. With one pair of row tiles the weight streams from memory at a fixed distance instead.
        const TilePrefetch ahead_w = pairs > 1 ? TilePrefetch{next_w + pair * k_tiles * w_bytes, w_bytes}
                                               : TilePrefetch{w + kStreamAhead, kBlockStep};
        const int64_t fetch_index = passed - fetch_from;
        const int64_t row_bytes = fetches_rows && 0 <= fetch_index && fetch_index < fetches ? step_bytes : 0;
        const Pass pass{row_tiles.at(panel, tile),
                        w,
                        k_tiles,
                        panel ? own : nullptr,
                        panel || width > kParts ? own + kPairSums : nullptr,
                        ahead_w,
                        TilePrefetch::from(next_rows.data, fetch_index * k_tiles * row_bytes, row_bytes, next_stride)};
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

// Multiplies a stripe of rows with the blocks of `results`, in bands. A result takes kParts consecutive blocks (2: gate
// and up). finish.write(parts, rows, result) receives the sums of each part as tiles, two side by side for each row
// tile of `rows` (see for_sums). sums: band_sums floats. After the last stripe nothing is prefetched.
template <class Dot, int kParts, class Finish>
static void multiply_stripe(const RowTiles& row_tiles, Range stripe, const char* weight, Range results,
                            const Blocking& blocking, int64_t m, float* sums, const Finish& finish,
                            bool last_stripe = false) {
  const int64_t end = results.end * kParts, step = std::max<int64_t>(blocking.band, kParts);
  Deferred<kParts, Finish> left{{&finish}};
  for (int64_t block = results.begin * kParts; block < end; block += step) {
    const Range band{block, std::min(block + step, end)};
    multiply_band<Dot, kParts>(row_tiles, stripe, weight, band, m, sums, last_stripe && band.end == end, left);
  }
  left.in_tiles.store_all();
  left.unfinished.all();
}

}  // namespace tilerank::TR_RUNG
