#ifndef TR_RUNG
#include <array>

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

// Hands sums in tiles to the epilogue.
template <int kParts>
struct LinearFinish {
  const Epilogue& epilogue;

  void write(const float* const (&parts)[kParts], Range rows, int64_t result) const {
    for_sums(rows, [&](int64_t row, int64_t i) {
      const auto sums = [&](int part) {
        return std::array{load(parts[part] + i), load(parts[part] + i + kTileRows * kLanes)};
      };
      epilogue.write(row, result, sums(0).data(), kParts == 2 ? sums(kParts - 1).data() : nullptr);
    });
  }
};

// At most 16 rows: the weight is read once, in order, as fast as memory gives it.
template <int kParts>
static void linear_few_rows(const Tensor& x, const char* rows, int64_t row_stride, int64_t tile_stride,
                            const Tensor& weight, const Epilogue& epilogue, Team& team) {
  const int64_t m = x.size[0], k_tiles = blocks(x.size[1], kBlockK);
  TileConfig config;
  for (int tile = 0; tile < 3; ++tile) config.set(tile, static_cast<int>(m), 64);
  for (int tile = 3; tile < 5; ++tile) config.set(tile, kTileRows, 64);
  const Tiles tiles(config);
  alignas(64) float sums[kParts][2 * kTileRows * kLanes];
  const Range share = team.share(epilogue.results);
  const char* w = weight.as<const char>() + share.begin * kParts * k_tiles * kBlockStep;
  for (int64_t result = share.begin; result < share.end; ++result) {
    const float* parts[kParts];
    for (int part = 0; part < kParts; ++part) {
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
      tile_store<0>(sums[part], 64);
      tile_store<1>(sums[part] + kTileRows * kLanes, 64);
      parts[part] = sums[part];
    }
    LinearFinish<kParts>{epilogue}.write(parts, {0, m}, result);
  }
}

template <int kParts>
static void linear_many_rows(const Tensor& x, const PackedRows& rows, const Blocking& blocking, const Tensor& weight,
                             const Epilogue& epilogue, Team& team) {
  const Tiles tiles(panel_tiles(kTileRows));
  float* const sums = static_cast<float*>(team.scratch(band_sums<kParts>(rows, blocking) * sizeof(float)));
  // Threads in a grid: over rows as far as each keeps enough of them to pay for reading the weight, then over outputs.
  int row_threads = 1;
  while (team.count % (row_threads * 2) == 0 && rows.row_tiles >= row_threads * 2 * 64) row_threads *= 2;
  const Team row_team(nullptr, team.index % row_threads, row_threads);
  const Team column_team(nullptr, team.index / row_threads, team.count / row_threads);
  const Range own_rows = row_team.share(rows.row_tiles, 2), own = column_team.share(epilogue.results);
  const int64_t end = own.end * kParts, step = std::max<int64_t>(blocking.band, kParts);
  for (int64_t tile = own_rows.begin; tile < own_rows.end; tile += blocking.stripe) {
    const Range stripe{tile, std::min(tile + blocking.stripe, own_rows.end)};
    for (int64_t block = own.begin * kParts; block < end; block += step) {
      const Range band{block, std::min(block + step, end)};
      multiply_band<Bf16Dot, kParts>(rows, stripe, weight.as<const char>(), band, x.size[0], sums,
                                     LinearFinish<kParts>{epilogue});
    }
  }
}

template <int kParts>
static void linear(const Args& args, const Epilogue& epilogue, Team& team) {
  const Tensor &x = args.tensor(0), &weight = args.tensor(5);
  const int64_t m = x.size[0], k = x.size[1];
  if (m <= kDirectRows && k % kBlockK == 0) {
    return linear_few_rows<kParts>(x, x.as<const char>(), x.stride[0] * 2, 64, weight, epilogue, team);
  }
  const int64_t row_tiles = blocks(m, kTileRows), k_tiles = blocks(k, kBlockK);
  const Blocking blocking = Blocking::of(row_tiles, k_tiles);
  const PackedRows rows{args.tensor(4).as<char>(), row_tiles, k_tiles, blocking.panel};
  pack_rows(x, rows, team);
  team.barrier();
  if (m <= kTileRows) return linear_few_rows<kParts>(x, rows.data, 64, kTileBytes, weight, epilogue, team);
  linear_many_rows<kParts>(x, rows, blocking, weight, epilogue, team);
}

// operands: the packed weight; scratch: bytes [m up to 16s][k up to 32s][2] for packed rows
static void linear_bf16(const Args& args, Team& team) {
  const Epilogue epilogue(args);
  epilogue.parts == 2 ? linear<2>(args, epilogue, team) : linear<1>(args, epilogue, team);
}
TR_KERNEL(linear_bf16)

}  // namespace tilerank::TR_RUNG
#endif
