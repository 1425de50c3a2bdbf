// The AMX micro-kernel of at most 16 rows: bound by memory, it reads the packed weight once, in order (include after
// gemm_amx-inl.h).
//
// Two blocks are multiplied side by side, which halves the number of times that the rows, too large for the L1 cache,
// are loaded from L2: every such load evicts a prefetched line. Weights are prefetched into L1, a few lines between any
// two products, 3 KiB before their use. At 4 KiB they would fall into the same cache sets as the lines in use.
#pragma once

namespace tilerank::TR_RUNG {

// The tile configuration of stream_blocks for m rows.
static inline TileConfig stream_tiles(int64_t m) { return tile_shapes(m, 5); }

// One tile of rows. K-tile t begins at data + t * tile_stride.
struct StreamedRows {
  const char* data;
  int64_t row_stride, tile_stride;  // bytes
};

static inline void fetch_lines(const char* p, int64_t lines) {
  asm("" : "+r"(p));  // forces one base address; GCC would otherwise keep one per line in registers
  for (int64_t line = 0; line < lines; ++line) _mm_prefetch(p + line * 64, _MM_HINT_T0);
}

// Sums of a tile of rows with two blocks, two tiles side by side per block.
using PairSums = float[2][2 * kTileRows * kLanes];

// sums = a tile of rows x a block and the next one. Calls meanwhile() at each of the first `busy` steps; its work
// overlaps with the wait for memory.
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

// sums = a tile of rows x one block.
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

// Multiplies a tile of m rows with `blocks` of a weight. write(sums, i, row) receives the sums of blocks i and i + 1
// (of the last block alone if their number is odd), row by row, while the next blocks are multiplied.
template <class Dot, class Write>
static inline void stream_blocks(const StreamedRows& rows, int64_t m, const char* weight, Range blocks, int64_t k_tiles,
                                 const Write& write) {
  alignas(64) PairSums sums[2];
  const int64_t rows_a_step = tilerank::blocks(m, k_tiles);
  int64_t done = m;  // written rows of the previous pair of blocks
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

// Returns a `write` for stream_blocks that passes results of kParts blocks to finish.write (see multiply_stripe).
template <int kParts, class Finish>
static inline auto stream_finish(const Finish& finish, Range blocks) {
  return [=, &finish](const PairSums& sums, int64_t block, int64_t row) {
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
