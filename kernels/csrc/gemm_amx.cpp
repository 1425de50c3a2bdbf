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
// Panels of many rows: a 32-output x kPanel piece of the weight (32 KiB) stays in the first-level cache while kStripe
// rows of activations (512 x 512, 512 KiB) and their sums (512 x kBand fp32, 1 MiB) stay in the second.
constexpr int64_t kPanel = 16;   // tiles of 32 inputs
constexpr int64_t kStripe = 32;  // tiles of 16 rows
constexpr int64_t kBand = 16;    // blocks of 32 outputs

static inline void prefetch_l2(const char* p) { _mm_prefetch(p, _MM_HINT_T1); }

// Activations in tiles, padded with zeros: [panels][row tiles][tiles of the panel][16 rows][32 inputs], so that what is
// used together is one piece of memory.
struct PackedRows {
  char* data;
  int64_t row_tiles, k_tiles;

  int64_t panel_tiles(int64_t panel) const { return std::min(kPanel, k_tiles - panel * kPanel); }
  char* tiles(int64_t panel, int64_t row_tile) const {
    return data + (panel * kPanel * row_tiles + row_tile * panel_tiles(panel)) * kTileBytes;
  }
};

static void pack_rows(const Tensor& x, const PackedRows& to, Team& team) {
  const int64_t m = x.size[0], k = x.size[1];
  const int64_t panels = blocks(to.k_tiles, kPanel);
  const Range tasks = team.share(panels * to.row_tiles);
  for (int64_t task = tasks.begin; task < tasks.end; ++task) {
    const int64_t panel = task / to.row_tiles, row_tile = task % to.row_tiles;
    char* const tiles = to.tiles(panel, row_tile);
    for (int64_t r = 0; r < kTileRows; ++r) {
      const int64_t row = row_tile * kTileRows + r;
      const bf16* const from = x.row<const bf16>(std::min(row, m - 1));
      for (int64_t t = 0; t < to.panel_tiles(panel); ++t) {
        const int64_t column = (panel * kPanel + t) * kBlockK;
        const int64_t count = row < m ? std::min(kBlockK, k - column) : 0;
        const __mmask32 mask = static_cast<__mmask32>((uint64_t{1} << count) - 1);
        _mm512_store_si512(tiles + t * kTileBytes + r * 64, _mm512_maskz_loadu_epi16(mask, from + column));
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
  constexpr int64_t kAhead = 16 << 10;  // bytes of weights in flight
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
      for (int64_t line = 0; line < kBlockStep; line += 64) prefetch_l2(w + kAhead + line);
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

// sums (+)= rows x weight over one panel: kRowTiles x 2 tiles of sums, 1 KiB each, one after the other. `ahead` is a
// piece of memory needed soon, two lines of it for each step.
template <int kRowTiles>
static inline void multiply_panel(const char* rows0, const char* rows1, const char* w, int64_t k_tiles, bool first,
                                  float* sums, const char* ahead) {
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
    prefetch_l2(ahead + t * 128);
    prefetch_l2(ahead + t * 128 + 64);
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
  const int64_t pairs = blocks(stripe.end - stripe.begin, 2), panels = blocks(rows.k_tiles, kPanel);
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t k_tiles = rows.panel_tiles(panel);
    for (int64_t block = band.begin; block < band.end; ++block) {
      const char* const w = weight + (block * rows.k_tiles + panel * kPanel) * kBlockStep;
      const char* const next = block + 1 < band.end
                                   ? w + rows.k_tiles * kBlockStep
                                   : weight + (band.begin * rows.k_tiles + (panel + 1) * kPanel) * kBlockStep;
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t tile = stripe.begin + pair * 2;
        float* const block_sums = sums + ((block - band.begin) * pairs + pair) * 4 * kTileRows * kLanes;
        const char* const rows0 = rows.tiles(panel, tile);
        const char* const ahead = next + pair * k_tiles * 128;
        if (tile + 1 < stripe.end) {
          multiply_panel<2>(rows0, rows0 + k_tiles * kTileBytes, w, k_tiles, panel == 0, block_sums, ahead);
        } else {
          multiply_panel<1>(rows0, nullptr, w, k_tiles, panel == 0, block_sums, ahead);
        }
        if (panel + 1 == panels) {
          const Range range{tile * kTileRows, std::min({(tile + 2) * kTileRows, stripe.end * kTileRows, m})};
          write_block(block_sums, epilogue, range, block * kBlockN);
        }
      }
    }
  }
}

static void linear_many_rows(const Tensor& x, const PackedRows& rows, const Tensor& weight, const Epilogue& epilogue,
                             Team& team) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, kTileRows, 64);
  const Tiles tiles(config);
  float* const sums = static_cast<float*>(team.scratch(kStripe * kBand * 2 * kTileBytes));
  // Threads in a grid: over rows as far as each keeps enough of them to pay for reading the weight, then over outputs.
  int row_threads = 1;
  while (team.count % (row_threads * 2) == 0 && rows.row_tiles >= row_threads * 2 * kStripe) row_threads *= 2;
  const Team row_team(nullptr, team.index % row_threads, row_threads);
  const Team column_team(nullptr, team.index / row_threads, team.count / row_threads);
  const Range own_rows = row_team.share(rows.row_tiles, 2), own_blocks = column_team.share(blocks(epilogue.n, kBlockN));
  for (int64_t tile = own_rows.begin; tile < own_rows.end; tile += kStripe) {
    const Range stripe{tile, std::min(tile + kStripe, own_rows.end)};
    for (int64_t block = own_blocks.begin; block < own_blocks.end; block += kBand) {
      const Range band{block, std::min(block + kBand, own_blocks.end)};
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
  const PackedRows rows{args.tensor(4).as<char>(), blocks(m, kTileRows), blocks(k, kBlockK)};
  pack_rows(x, rows, team);
  team.barrier();
  if (m <= kTileRows) return linear_few_rows(x, rows.data, 64, kTileBytes, weight, epilogue, team);
  linear_many_rows(x, rows, weight, epilogue, team);
}
TR_KERNEL(linear_bf16)

}  // namespace tilerank::TR_RUNG
#endif
