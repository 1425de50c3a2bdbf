#ifndef TR_RUNG
#include "kernel.h"
#include "pack.h"

#define TR_ONLY_AMX
#define TR_SOURCE "gemm_amx.cpp"
#include "foreach_isa.h"

#else
#include "amx.h"
#include "epilogue.h"

namespace tilerank::TR_RUNG {

// Every sum runs over k in tiles of 32 in order, in one chain (through memory between panels, which is exact), whatever
// the number of rows: a row's bits do not depend on its batch.

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kBlockStep = 2 * kTileBytes;  // of a packed weight block, for 32 inputs

// Up to this many rows the tiles are read from x itself: packing would cost a barrier.
constexpr int64_t kDirectRows = 8;
constexpr int64_t kStreamAhead = 16 << 10;  // bytes of a weight that is read in order

static inline void prefetch_l2(const char* p) { _mm_prefetch(p, _MM_HINT_T1); }
static inline void prefetch_write(const void* p) { asm volatile("prefetchw %0" ::"m"(*static_cast<const char*>(p))); }

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

// Activations in tiles, padded with zeros: [panels][row tiles][tiles of the panel][16 rows][32 inputs], so that what is
// used together is one piece of memory.
struct PackedRows {
  char* data;
  int64_t row_tiles, k_tiles, panel;

  int64_t panel_tiles(int64_t p) const { return std::min(panel, k_tiles - p * panel); }
  char* tiles(int64_t p, int64_t row_tile) const {
    return data + (p * panel * row_tiles + row_tile * panel_tiles(p)) * kTileBytes;
  }
};

static void pack_rows(const Tensor& x, const PackedRows& to, Team& team) {
  constexpr int64_t kPiece = 64;  // tiles: 4 KiB of a row
  const int64_t m = x.size[0], k = x.size[1];
  const int64_t pieces = blocks(to.k_tiles, kPiece);
  const Range tasks = team.share(pieces * to.row_tiles);
  for (int64_t task = tasks.begin; task < tasks.end; ++task) {
    const int64_t row_tile = task / pieces, first = task % pieces * kPiece;
    const int64_t last = std::min(first + kPiece, to.k_tiles);
    for (int64_t r = 0; r < kTileRows; ++r) {
      const int64_t row = row_tile * kTileRows + r;
      const bf16* const from = x.row<const bf16>(std::min(row, m - 1));
      for (int64_t t = first; t < last; ++t) {
        const int64_t count = row < m ? std::min(kBlockK, k - t * kBlockK) : 0;
        const __mmask32 mask = static_cast<__mmask32>((uint64_t{1} << count) - 1);
        _mm512_store_si512(to.tiles(t / to.panel, row_tile) + t % to.panel * kTileBytes + r * 64,
                           _mm512_maskz_loadu_epi16(mask, from + t * kBlockK));
      }
    }
  }
}

// Sums of a block: two tiles side by side for each of its (one or two) row tiles.
static void write_block(const float* sums, const Epilogue& epilogue, Range rows, int64_t column) {
  for (int64_t row = rows.begin; row < rows.end; ++row, sums += kLanes) {
    if ((row - rows.begin) == kTileRows) sums += kTileRows * kLanes;
    epilogue.write(load(sums), row, column);
    epilogue.write(load(sums + kTileRows * kLanes), row, column + kLanes);
  }
}

// At most 16 rows: the weight is read once, in order, as fast as memory gives it.
static void linear_few_rows(const Tensor& x, const char* rows, int64_t row_stride, int64_t tile_stride,
                            const Tensor& weight, const Epilogue& epilogue, Team& team) {
  const int64_t m = x.size[0], k_tiles = blocks(x.size[1], kBlockK);
  TileConfig config;
  for (int tile = 0; tile < 3; ++tile) config.set(tile, static_cast<int>(m), 64);
  for (int tile = 3; tile < 5; ++tile) config.set(tile, kTileRows, 64);
  const Tiles tiles(config);
  alignas(64) float sums[2 * kTileRows * kLanes];
  const Range share = team.share(blocks(epilogue.n, kBlockN));
  const char* w = weight.as<const char>() + share.begin * k_tiles * kBlockStep;
  for (int64_t block = share.begin; block < share.end; ++block) {
    tile_zero<0>();
    tile_zero<1>();
    for (int64_t t = 0; t < k_tiles; ++t, w += kBlockStep) {
      for (int64_t line = 0; line < kBlockStep; line += 64) prefetch_l2(w + kStreamAhead + line);
      tile_load<2>(rows + t * tile_stride, row_stride);
      tile_load_stream<3>(w, 64);
      tile_load_stream<4>(w + kTileBytes, 64);
      tile_dot_bf16<0, 2, 3>();
      tile_dot_bf16<1, 2, 4>();
    }
    tile_store<0>(sums, 64);
    tile_store<1>(sums + kTileRows * kLanes, 64);
    write_block(sums, epilogue, {0, m}, block * kBlockN);
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
template <int kRowTiles>
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
    tile_dot_bf16<0, 4, 6>();
    tile_load<7>(w + t * kBlockStep + kTileBytes, 64);
    tile_dot_bf16<1, 4, 7>();
    if (kRowTiles == 2) {
      tile_load<5>(rows1 + t * kTileBytes, 64);
      tile_dot_bf16<2, 5, 6>();
      tile_dot_bf16<3, 5, 7>();
    }
  }
  tile_store<0>(sums, 64);
  tile_store<1>(sums + 256, 64);
  if (kRowTiles == 2) tile_store<2>(sums + 512, 64);
  if (kRowTiles == 2) tile_store<3>(sums + 768, 64);
}

// The sums of a stripe of rows x a band of outputs, panel by panel.
static void multiply_band(const PackedRows& rows, Range stripe, const char* weight, Range band, int64_t m,
                          const Epilogue& epilogue, float* sums) {
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
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t tile = stripe.begin + pair * 2;
        float* const block_sums =
            sums + ((block - band.begin) * pairs + pair) * (panels > 1 ? 4 * kTileRows * kLanes : 0);
        const char* const rows0 = rows.tiles(panel, tile);
        // Few rows: the first pair streams the weight from memory, the others find it in the cache. Many: the next
        // block is fetched bit by bit while this one is used.
        const Ahead ahead_w = pairs > 3   ? Ahead{next_w + pair * k_tiles * w_lines * 64, w_lines}
                              : pair == 0 ? Ahead{w + kStreamAhead, kBlockStep / 64}
                                          : Ahead{nullptr, 0};
        const Ahead ahead_rows{next_rows + ((block - band.begin) * pairs + pair) * k_tiles * row_lines * 64, row_lines};
        const Range range{tile * kTileRows, std::min({(tile + 2) * kTileRows, stripe.end * kTileRows, m})};
        if (panel + 1 == panels) epilogue.prefetch(range, block * kBlockN, prefetch_write);
        if (tile + 1 < stripe.end) {
          multiply_panel<2>(rows0, rows0 + k_tiles * kTileBytes, w, k_tiles, panel == 0, block_sums, ahead_w,
                            ahead_rows);
        } else {
          multiply_panel<1>(rows0, nullptr, w, k_tiles, panel == 0, block_sums, ahead_w, ahead_rows);
        }
        if (panel + 1 == panels) {
          write_block(block_sums, epilogue, range, block * kBlockN);
        }
      }
    }
  }
}

static void linear_many_rows(const Tensor& x, const PackedRows& rows, const Blocking& blocking, const Tensor& weight,
                             const Epilogue& epilogue, Team& team) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, kTileRows, 64);
  const Tiles tiles(config);
  const int64_t sum_tiles = rows.panel < rows.k_tiles ? blocking.stripe * blocking.band * 2 : 4;
  float* const sums = static_cast<float*>(team.scratch(sum_tiles * kTileBytes));
  // Threads in a grid: over rows as far as each keeps enough of them to pay for reading the weight, then over outputs.
  int row_threads = 1;
  while (team.count % (row_threads * 2) == 0 && rows.row_tiles >= row_threads * 2 * 32) row_threads *= 2;
  const Team row_team(nullptr, team.index % row_threads, row_threads);
  const Team column_team(nullptr, team.index / row_threads, team.count / row_threads);
  const Range own_rows = row_team.share(rows.row_tiles, 2), own_blocks = column_team.share(blocks(epilogue.n, kBlockN));
  for (int64_t tile = own_rows.begin; tile < own_rows.end; tile += blocking.stripe) {
    const Range stripe{tile, std::min(tile + blocking.stripe, own_rows.end)};
    for (int64_t block = own_blocks.begin; block < own_blocks.end; block += blocking.band) {
      const Range band{block, std::min(block + blocking.band, own_blocks.end)};
      multiply_band(rows, stripe, weight.as<const char>(), band, x.size[0], epilogue, sums);
    }
  }
}

// tensors: x[m, k], packed weight, bias[n] or none, out[m, n], scratch[m up to 16s, k up to 32s] for packed rows
static void linear_bf16(const Args& args, Team& team) {
  const Tensor &x = args.tensor(0), &weight = args.tensor(1);
  const Epilogue epilogue(args.tensor(2), args.tensor(3));
  const int64_t m = x.size[0], k = x.size[1];
  if (m <= kDirectRows && k % kBlockK == 0) {
    return linear_few_rows(x, x.as<const char>(), x.stride[0] * 2, 64, weight, epilogue, team);
  }
  const int64_t row_tiles = blocks(m, kTileRows), k_tiles = blocks(k, kBlockK);
  const Blocking blocking = Blocking::of(row_tiles, k_tiles);
  const PackedRows rows{args.tensor(4).as<char>(), row_tiles, k_tiles, blocking.panel};
  pack_rows(x, rows, team);
  team.barrier();
  if (m <= kTileRows) return linear_few_rows(x, rows.data, 64, kTileBytes, weight, epilogue, team);
  linear_many_rows(x, rows, blocking, weight, epilogue, team);
}
TR_KERNEL(linear_bf16)

}  // namespace tilerank::TR_RUNG
#endif
