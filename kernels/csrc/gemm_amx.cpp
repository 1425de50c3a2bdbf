#ifndef TR_RUNG
#include "kernel.h"
#include "pack.h"

#define TR_ONLY_AMX
#define TR_SOURCE "gemm_amx.cpp"
#include "foreach_isa.h"

#else
#include "epilogue.h"
#include "gemm_amx.h"

namespace tilerank::TR_RUNG {

// Up to this many rows the tiles are read from x itself: packing would cost a barrier.
constexpr int64_t kDirectRows = 8;

static void pack_rows(const Tensor& x, const PackedRows& to, Team& team) {
  constexpr int64_t kPiece = 64;  // tiles: 4 KiB of a row
  const int64_t m = x.size[0], k = x.size[1];
  const int64_t pieces = blocks(to.k_tiles, kPiece);
  const Range tasks = team.share(pieces * to.row_tiles);
  for (int64_t task = tasks.begin; task < tasks.end; ++task) {
    const int64_t row_tile = task / pieces, first = task % pieces * kPiece;
    const int64_t last = std::min(first + kPiece, to.k_tiles);
    const int64_t count = std::min(kTileRows, m - row_tile * kTileRows);
    for (int64_t r = 0; r < count; ++r) {
      pack_row(x.row<const bf16>(row_tile * kTileRows + r), k, to, row_tile, r, {first, last});
    }
  }
}

// Hands the sums of a block to the epilogue.
struct LinearFinish {
  const Epilogue& epilogue;

  void prefetch(Range rows, int64_t block) const { epilogue.prefetch(rows, block * kBlockN, prefetch_write); }
  void write(const float* const (&parts)[1], Range rows, int64_t block) const {
    for_sums(rows, [&](int64_t row, int64_t i) {
      epilogue.write(load(parts[0] + i), row, block * kBlockN);
      epilogue.write(load(parts[0] + i + kTileRows * kLanes), row, block * kBlockN + kLanes);
    });
  }
};

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
    LinearFinish{epilogue}.write({sums}, {0, m}, block);
  }
}

static void linear_many_rows(const Tensor& x, const PackedRows& rows, const Blocking& blocking, const Tensor& weight,
                             const Epilogue& epilogue, Team& team) {
  const Tiles tiles(panel_tiles(kTileRows));
  float* const sums = static_cast<float*>(team.scratch(band_sums<1>(rows, blocking) * sizeof(float)));
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
      multiply_band<1>(rows, stripe, weight.as<const char>(), band, x.size[0], sums, LinearFinish{epilogue});
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
