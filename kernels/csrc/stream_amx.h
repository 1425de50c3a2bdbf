// Products of at most 16 rows with a packed weight in AMX tiles, which is read once, as fast as memory gives it
// (include after gemm_amx.h).
//
// What is fetched ahead goes into the first level, in one stream, 2 KiB before it is used, a few lines between any two
// products. Against a plain loop over memory that is, measured, 1.1 for 1 row and 1.04 for 16; all lines of a step at
// once come to 1.06; two blocks side by side, whose streams are a power of two apart, to 0.93 and 0.83; 4 KiB ahead,
// which meets in the same sets of the cache as what is in use, to 1.07.
#pragma once

namespace tilerank::TR_RUNG {

// The tiles that stream_block uses, for m rows.
static inline TileConfig stream_tiles(int64_t m) {
  TileConfig config;
  for (int tile = 0; tile < 3; ++tile) config.set(tile, static_cast<int>(m), 64);
  for (int tile = 3; tile < 5; ++tile) config.set(tile, kTileRows, 64);
  return config;
}

// sums = a tile of rows x a block, two tiles of sums side by side. In tile t of k the rows' inputs are at rows + t *
// tile_stride.
template <class Dot>
static inline void stream_block(const char* rows, int64_t row_stride, int64_t tile_stride, const char* weight,
                                int64_t k_tiles, float* sums) {
  tile_zero<0>();
  tile_zero<1>();
  for (int64_t t = 0; t < k_tiles; ++t, rows += tile_stride, weight += kBlockStep) {
    const auto fetch_quarter = [&](int64_t quarter) {  // of the next step, also where that is the next block's first
      const char* const ahead = weight + kBlockStep + quarter * kBlockStep / 4;
      for (int64_t line = 0; line < kBlockStep / 4; line += 64) _mm_prefetch(ahead + line, _MM_HINT_T0);
    };
    fetch_quarter(0);
    tile_load<2>(rows, row_stride);
    tile_load_stream<3>(weight, 64);
    tile_load_stream<4>(weight + kTileBytes, 64);
    Dot::template run<0, 2, 3>();
    fetch_quarter(1);
    Dot::template run<1, 2, 4>();
    fetch_quarter(2);
    fetch_quarter(3);
  }
  tile_store<0>(sums, 64);
  tile_store<1>(sums + kTileRows * kLanes, 64);
}

// The product of a tile of rows with `blocks` of a weight. write(sums, i) gets the sums of blocks i and i + 1; of the
// last block of an odd number alone. prefetch(i) comes before.
template <class Dot, class Prefetch, class Write>
static inline void stream_blocks(const char* rows, int64_t row_stride, int64_t tile_stride, const char* weight,
                                 Range blocks, int64_t k_tiles, const Prefetch& prefetch, const Write& write) {
  alignas(64) float sums[2][2 * kTileRows * kLanes];
  for (int64_t i = blocks.begin; i < blocks.end; i += 2) {
    prefetch(i);
    for (int64_t j = i; j < std::min(i + 2, blocks.end); ++j) {
      stream_block<Dot>(rows, row_stride, tile_stride, weight + j * k_tiles * kBlockStep, k_tiles, sums[j - i]);
    }
    write(sums, i);
  }
}

}  // namespace tilerank::TR_RUNG
