// Products of at most 16 rows with a packed weight in AMX tiles, which is read once, as fast as memory gives it
// (include after gemm_amx.h).
//
// Two blocks are multiplied side by side, so that the rows, which do not fit the first-level cache, come from the
// second level half as often: each of their lines takes the place of one that is asked for from memory. What is
// fetched ahead goes into the first level, 3 KiB before it is used and no further (4 KiB ahead meets in the same sets
// of the cache as what is in use), a few lines between any two products.
#pragma once

namespace tilerank::TR_RUNG {

// The tiles that stream_blocks uses, for m rows.
static inline TileConfig stream_tiles(int64_t m) {
  TileConfig config;
  for (int tile = 0; tile < 5; ++tile) config.set(tile, static_cast<int>(m), 64);
  for (int tile = 5; tile < 8; ++tile) config.set(tile, kTileRows, 64);
  return config;
}

// A tile of rows: in tile t of k the inputs of a row are at data + t * tile_stride.
struct StreamedRows {
  const char* data;
  int64_t row_stride, tile_stride;  // bytes
};

static inline void fetch_lines(const char* p, int64_t lines) {
  asm("" : "+r"(p));  // one address for all: GCC keeps one for each line else, and a tenth of the rate is lost
  for (int64_t line = 0; line < lines; ++line) _mm_prefetch(p + line * 64, _MM_HINT_T0);
}

// Sums of a tile of rows with two blocks, for each two tiles side by side.
using PairSums = float[2][2 * kTileRows * kLanes];

// sums = a tile of rows x a block and the next one. meanwhile() is called at each of the first `busy` steps: what it
// does costs little, because memory is what is waited for.
template <class Dot, class F>
static inline void stream_pair(const StreamedRows& rows, const char* weight, int64_t k_tiles, PairSums& sums,
                               int64_t busy, const F& meanwhile) {
  constexpr int64_t kHalf = kTileBytes / 64 / 2;  // lines
  const int64_t block = k_tiles * kBlockStep;
  const char* x = rows.data;
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  int64_t t = 0;
  const auto steps = [&](int64_t end, const auto& meanwhile) {
    for (; t < end; ++t, x += rows.tile_stride, weight += kBlockStep) {
      const char* const second = weight + block;
      const char* const next = t + 1 < k_tiles ? weight + kBlockStep : second + kBlockStep;  // the next pair's first
      const auto fetch_half = [&](const char* tile, int64_t half) { fetch_lines(tile + half * kHalf * 64, kHalf); };
      fetch_half(second + kTileBytes, 0);
      tile_load<4>(x, rows.row_stride);
      tile_load_stream<5>(weight, 64);
      fetch_half(second + kTileBytes, 1);
      tile_load_stream<6>(weight + kTileBytes, 64);
      Dot::template run<0, 4, 5>();
      fetch_half(next, 0);
      Dot::template run<1, 4, 6>();
      fetch_half(next, 1);
      tile_load_stream<7>(second, 64);
      fetch_half(next + kTileBytes, 0);
      tile_load_stream<5>(second + kTileBytes, 64);
      fetch_half(next + kTileBytes, 1);
      Dot::template run<2, 4, 7>();
      fetch_half(next + block, 0);
      Dot::template run<3, 4, 5>();
      meanwhile();
      fetch_half(next + block, 1);
    }
  };
  steps(busy, meanwhile);
  steps(k_tiles, [] {});
  tile_store<0>(sums[0], 64);
  tile_store<1>(sums[0] + kTileRows * kLanes, 64);
  tile_store<2>(sums[1], 64);
  tile_store<3>(sums[1] + kTileRows * kLanes, 64);
}

// The same of one block.
template <class Dot>
static inline void stream_block(const StreamedRows& rows, const char* weight, int64_t k_tiles, float* sums) {
  const char* x = rows.data;
  tile_zero<0>();
  tile_zero<1>();
  for (int64_t t = 0; t < k_tiles; ++t, x += rows.tile_stride, weight += kBlockStep) {
    fetch_lines(weight + kBlockStep, kBlockStep / 64 / 2);
    tile_load<4>(x, rows.row_stride);
    tile_load_stream<5>(weight, 64);
    tile_load_stream<6>(weight + kTileBytes, 64);
    Dot::template run<0, 4, 5>();
    fetch_lines(weight + kBlockStep + kTileBytes, kBlockStep / 64 / 2);
    Dot::template run<1, 4, 6>();
  }
  tile_store<0>(sums, 64);
  tile_store<1>(sums + kTileRows * kLanes, 64);
}

// The product of a tile of m rows with `blocks` of a weight. write(sums, i, row) gets the sums of blocks i and i + 1,
// of the last block of an odd number alone, row by row, while the next blocks are multiplied.
template <class Dot, class Write>
static inline void stream_blocks(const StreamedRows& rows, int64_t m, const char* weight, Range blocks, int64_t k_tiles,
                                 const Write& write) {
  alignas(64) PairSums sums[2];
  const int64_t rows_a_step = tilerank::blocks(m, k_tiles);
  int64_t done = m;  // rows of the blocks before
  for (int64_t i = blocks.begin; i < blocks.end; i += 2) {
    const char* const first = weight + i * k_tiles * kBlockStep;
    PairSums &own = sums[i / 2 % 2], &before = sums[1 - i / 2 % 2];
    const auto meanwhile = [&] {
      for (const int64_t end = std::min(done + rows_a_step, m); done < end; ++done) write(before, i - 2, done);
    };
    if (i + 1 < blocks.end) {
      stream_pair<Dot>(rows, first, k_tiles, own, tilerank::blocks(m - done, rows_a_step), meanwhile);
    } else {
      stream_block<Dot>(rows, first, k_tiles, own[0]);
    }
    for (; done < m; ++done) write(before, i - 2, done);
    done = 0;
  }
  const int64_t last = blocks.begin + (blocks.end - blocks.begin - 1) / 2 * 2;
  for (; done < m; ++done) write(sums[last / 2 % 2], last, done);
}

// How stream_blocks writes results of kParts blocks each, as finish.write in multiply_stripe gets them.
template <int kParts, class Finish>
static inline auto stream_finish(const Finish& finish, Range blocks) {
  return [&finish, blocks](const PairSums& sums, int64_t block, int64_t row) {
    const float *const first = sums[0] + row * kLanes, *const second = sums[1] + row * kLanes;
    if constexpr (kParts == 2) {
      finish.write({first, second}, {row, row + 1}, block / 2);
    } else {
      finish.write({first}, {row, row + 1}, block);
      if (block + 1 < blocks.end) finish.write({second}, {row, row + 1}, block + 1);
    }
  };
}

}  // namespace tilerank::TR_RUNG
