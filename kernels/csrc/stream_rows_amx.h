// Products of at most 64 rows with a packed weight in AMX tiles, which is read once, as fast as memory gives it
// (include after gemm_amx.h). As in stream_amx.h the weight comes in one stream, 2 KiB ahead, a few lines between any
// two products; up to three tiles of rows are multiplied with each of its tiles. Of four the second two are multiplied
// with a block when the first are, which left it in the second-level cache.
#pragma once

namespace tilerank::TR_RUNG {

constexpr int64_t kStreamedTiles = 4, kTilesAtOnce = 3;

// Are so many tiles of rows multiplied in this way? Four of them have to stay in the second-level cache, and a block.
static inline bool streams_rows(int64_t row_tiles, int64_t k_tiles) {
  constexpr int64_t kMost = 192;
  return row_tiles <= kTilesAtOnce || (row_tiles == kStreamedTiles && k_tiles <= kMost);
}

constexpr int64_t kStreamedSums = 2 * kTileRows * kLanes;  // of a tile of rows with a block: two tiles side by side

// The tiles that stream_rows uses, for m rows.
static inline TileConfig streamed_tiles(int64_t m) {
  TileConfig config;
  for (int tile = 0; tile < 6; ++tile) config.set(tile, static_cast<int>(std::min(m, kTileRows)), 64);
  for (int tile = 6; tile < 8; ++tile) config.set(tile, kTileRows, 64);
  return config;
}

// sums = kRowTiles tiles of rows x a block. meanwhile() is called at every step: what it does
// costs little, because memory is what is waited for.
template <class Dot, int kRowTiles, class F>
static inline void stream_rows(const PackedRows& packed, const char* weight, float* sums, const F& meanwhile) {
  const char* rows = packed.data;
  const int64_t k_tiles = packed.k_tiles, stride = k_tiles * kTileBytes;
  tile_zero<0>();
  tile_zero<1>();
  if (kRowTiles > 1) tile_zero<2>();
  if (kRowTiles > 1) tile_zero<3>();
  if (kRowTiles > 2) tile_zero<4>();
  if (kRowTiles > 2) tile_zero<5>();
  for (int64_t t = 0; t < k_tiles; ++t, rows += kTileBytes, weight += kBlockStep) {
    const char* ahead = weight + kBlockStep;  // the next step, also where that is the next block's first
    const auto fetch = [&](int lines) {
      for (int i = 0; i < lines; ++i, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T0);
    };
    if constexpr (kRowTiles < 3) {
      tile_load<4>(rows, 64);
      fetch(4);
      tile_load_stream<6>(weight, 64);
      fetch(6);
      Dot::template run<0, 4, 6>();
      fetch(2);
      tile_load_stream<7>(weight + kTileBytes, 64);
      fetch(4);
      Dot::template run<1, 4, 7>();
      fetch(4);
      meanwhile();
      if constexpr (kRowTiles == 2) tile_load<5>(rows + stride, 64);
      fetch(4);
      if constexpr (kRowTiles == 2) Dot::template run<2, 5, 6>();
      fetch(4);
      if constexpr (kRowTiles == 2) Dot::template run<3, 5, 7>();
      fetch(4);
    } else {
      tile_load<7>(rows, 64);
      tile_load_stream<6>(weight, 64);
      fetch(2);
      Dot::template run<0, 7, 6>();
      fetch(4);
      tile_load<7>(rows + stride, 64);
      fetch(2);
      Dot::template run<2, 7, 6>();
      fetch(4);
      tile_load<7>(rows + 2 * stride, 64);
      fetch(2);
      Dot::template run<4, 7, 6>();
      fetch(4);
      tile_load_stream<6>(weight + kTileBytes, 64);
      fetch(2);
      Dot::template run<5, 7, 6>();
      meanwhile();
      fetch(2);
      tile_load<7>(rows, 64);
      fetch(2);
      Dot::template run<1, 7, 6>();
      fetch(2);
      tile_load<7>(rows + stride, 64);
      fetch(2);
      Dot::template run<3, 7, 6>();
      fetch(4);
    }
  }
  constexpr int64_t kTileSums = kTileRows * kLanes;
  tile_store<0>(sums, 64);
  tile_store<1>(sums + kTileSums, 64);
  if (kRowTiles > 1) tile_store<2>(sums + 2 * kTileSums, 64);
  if (kRowTiles > 1) tile_store<3>(sums + 3 * kTileSums, 64);
  if (kRowTiles > 2) tile_store<4>(sums + 4 * kTileSums, 64);
  if (kRowTiles > 2) tile_store<5>(sums + 5 * kTileSums, 64);
}

// Floats that multiply_streamed wants for sums.
template <int kParts>
static constexpr int64_t streamed_sums() {
  return 2 * kParts * kStreamedTiles * kStreamedSums;
}

// The products of m rows, all inputs in one panel, with the blocks of `results`, kParts of the weight for each; finish
// as in multiply_stripe, while the next products run.
template <class Dot, int kParts, int kRowTiles, class Finish>
static void multiply_streamed(const PackedRows& rows, int64_t m, const char* weight, Range results, float* sums,
                              const Finish& finish) {
  constexpr int64_t kPart = kRowTiles * kStreamedSums;
  const int64_t rows_a_step = blocks(m, kParts * rows.k_tiles);
  [[maybe_unused]] const PackedRows last_two{rows.data + 2 * rows.k_tiles * kTileBytes, 2, rows.k_tiles, rows.k_tiles};
  Unfinished<kParts, Finish> unfinished{&finish};
  const auto meanwhile = [&] {
    for (int64_t i = 0; i < rows_a_step && unfinished.any(); ++i) unfinished.row();
  };
  for (int64_t result = results.begin; result < results.end; ++result) {
    float* const own = sums + (result & 1) * kParts * kPart;
    for (int part = 0; part < kParts; ++part) {
      const char* const block = weight + (result * kParts + part) * rows.k_tiles * kBlockStep;
      float* const to = own + part * kPart;
      if constexpr (kRowTiles < 4) {
        stream_rows<Dot, kRowTiles>(rows, block, to, meanwhile);
      } else {
        stream_rows<Dot, 2>(rows, block, to, meanwhile);
        stream_rows<Dot, 2>(last_two, block, to + 2 * kStreamedSums, meanwhile);
      }
    }
    for (int part = 0; part < kParts; ++part) unfinished.parts[part] = own + part * kPart;
    unfinished.rows = {0, m};
    unfinished.result = result;
    unfinished.done = 0;
  }
  unfinished.all();
}

template <class Dot, int kParts, class Finish>
static void multiply_streamed(const PackedRows& rows, int64_t m, const char* weight, Range results, float* sums,
                              const Finish& finish) {
  const Tiles tiles(streamed_tiles(m));
  if (rows.row_tiles == 1) {
    multiply_streamed<Dot, kParts, 1>(rows, m, weight, results, sums, finish);
  } else if (rows.row_tiles == 2) {
    multiply_streamed<Dot, kParts, 2>(rows, m, weight, results, sums, finish);
  } else if (rows.row_tiles == 3) {
    multiply_streamed<Dot, kParts, 3>(rows, m, weight, results, sums, finish);
  } else {
    multiply_streamed<Dot, kParts, 4>(rows, m, weight, results, sums, finish);
  }
}

}  // namespace tilerank::TR_RUNG
