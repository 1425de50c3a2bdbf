// Products of at most 16 rows with a packed weight in AMX tiles, which is read once, as fast as memory gives it
// (include after gemm_amx.h).
//
// Two blocks at a time: a tile of rows, which comes from the second-level cache when whole rows do not fit the first,
// serves both. What is fetched ahead goes into the first level and comes 2 KiB before it is used: measured, the
// memory's whole bandwidth for 1 and for 16 rows, where one block at a time, fetched into the second level, reaches
// 0.92 and 0.88 of it, and 4 or 8 KiB ahead, which meet in the same sets of the cache as what is in use, 0.95.
#pragma once

namespace tilerank::TR_RUNG {

// The tiles that stream_pair uses, for m rows.
static inline TileConfig stream_tiles(int64_t m) {
  TileConfig config;
  for (int tile = 0; tile < 5; ++tile) config.set(tile, static_cast<int>(m), 64);
  for (int tile = 5; tile < 8; ++tile) config.set(tile, kTileRows, 64);
  return config;
}

// sums[0] and sums[1] = a tile of rows x each of two blocks, two tiles of sums side by side. In tile t of k the rows'
// inputs are at rows + t * tile_stride, the weight's at w[0] and w[1] + t * kBlockStep. next: the two blocks after
// these.
template <class Dot>
static inline void stream_pair(const char* rows, int64_t row_stride, int64_t tile_stride, const char* const (&w)[2],
                               const char* const (&next)[2], int64_t k_tiles,
                               float (&sums)[2][2 * kTileRows * kLanes]) {
  const auto fetch = [](const char* p) {
    for (int64_t line = 0; line < kBlockStep; line += 64) _mm_prefetch(p + line, _MM_HINT_T0);
  };
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  for (int64_t t = 0; t < k_tiles; ++t) {
    const char *const first = w[0] + t * kBlockStep, *const second = w[1] + t * kBlockStep;
    fetch(t + 1 < k_tiles ? first + kBlockStep : next[0]);
    fetch(t + 1 < k_tiles ? second + kBlockStep : next[1]);
    tile_load<4>(rows + t * tile_stride, row_stride);
    tile_load_stream<5>(first, 64);
    tile_load_stream<6>(first + kTileBytes, 64);
    Dot::template run<0, 4, 5>();
    Dot::template run<1, 4, 6>();
    tile_load_stream<5>(second, 64);
    tile_load_stream<6>(second + kTileBytes, 64);
    Dot::template run<2, 4, 5>();
    Dot::template run<3, 4, 6>();
  }
  tile_store<0>(sums[0], 64);
  tile_store<1>(sums[0] + kTileRows * kLanes, 64);
  tile_store<2>(sums[1], 64);
  tile_store<3>(sums[1] + kTileRows * kLanes, 64);
}

// The product of a tile of rows with `blocks` of a weight, two by two. write(sums, i) gets the sums of blocks i and
// i + 1; of the last block of an odd number twice. prefetch(i) comes before.
template <class Dot, class Prefetch, class Write>
static inline void stream_blocks(const char* rows, int64_t row_stride, int64_t tile_stride, const char* weight,
                                 Range blocks, int64_t k_tiles, const Prefetch& prefetch, const Write& write) {
  alignas(64) float sums[2][2 * kTileRows * kLanes];
  const auto block = [&](int64_t i) { return weight + std::min(i, blocks.end - 1) * k_tiles * kBlockStep; };
  for (int64_t i = blocks.begin; i < blocks.end; i += 2) {
    prefetch(i);
    stream_pair<Dot>(rows, row_stride, tile_stride, {block(i), block(i + 1)}, {block(i + 2), block(i + 3)}, k_tiles,
                     sums);
    write(sums, i);
  }
}

}  // namespace tilerank::TR_RUNG
