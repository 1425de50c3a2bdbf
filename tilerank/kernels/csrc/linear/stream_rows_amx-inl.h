// The AMX micro-kernel of at most 64 rows, which reads the packed weight once, in order (include after gemm_amx-inl.h).
// As in stream_amx-inl.h, weights are prefetched a few lines between any two products, here 2 KiB ahead. Up to three
// row tiles are multiplied with each tile of the weight. Of four row tiles, the second two are multiplied with a block
// right after the first two, when the block is still in the L2 cache.
#pragma once

namespace tilerank::TR_RUNG {

constexpr int64_t kStreamedTiles = 4, kTilesAtOnce = 3;

// Whether multiply_streamed supports this number of row tiles. Four of them must fit in L2 together with a block.
static inline bool streams_rows(int64_t row_tiles, int64_t k_tiles) {
  constexpr int64_t kMost = 192;
  return row_tiles <= kTilesAtOnce || (row_tiles == kStreamedTiles && k_tiles <= kMost);
}

constexpr int64_t kStreamedSums = 2 * kTileRows * kLanes;  // sums of a row tile with a block: two tiles side by side

// sums = kRowTiles row tiles x a block. Calls meanwhile() at every step; its work overlaps with the wait for memory.
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
    const char* ahead = weight + kBlockStep;  // the next step, which may be the first of the next block
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

// The number of floats of the buffer `sums` of multiply_streamed.
template <int kParts>
static constexpr int64_t streamed_sums() {
  return 2 * kParts * kStreamedTiles * kStreamedSums;
}

// Multiplies m rows, whose inputs form one panel, with the blocks of `results`, kParts blocks each. finish as in
// multiply_stripe; it is called while the next products run.
template <class Dot, int kParts, int kRowTiles, class Finish>
static void multiply_streamed(const PackedRows& rows, int64_t m, const char* weight, Range results, float* sums,
                              const Finish& finish) {
  constexpr int64_t kPartUnits = kRowTiles * kStreamedSums;
  const int64_t rows_a_step = blocks(m, kParts * rows.k_tiles);
  [[maybe_unused]] const PackedRows last_two{rows.data + 2 * rows.k_tiles * kTileBytes, 2, rows.k_tiles, rows.k_tiles};
  PendingRows<kParts, Finish> unfinished{&finish};
  const auto meanwhile = [&] {
    for (int64_t i = 0; i < rows_a_step && unfinished.any(); ++i) unfinished.row();
  };
  for (int64_t result = results.begin; result < results.end; ++result) {
    float* const own = sums + (result & 1) * kParts * kPartUnits;
    for (int part = 0; part < kParts; ++part) {
      const char* const block = weight + (result * kParts + part) * rows.k_tiles * kBlockStep;
      float* const to = own + part * kPartUnits;
      if constexpr (kRowTiles < 4) {
        stream_rows<Dot, kRowTiles>(rows, block, to, meanwhile);
      } else {
        stream_rows<Dot, 2>(rows, block, to, meanwhile);
        stream_rows<Dot, 2>(last_two, block, to + 2 * kStreamedSums, meanwhile);
      }
    }
    for (int part = 0; part < kParts; ++part) unfinished.parts[part] = own + part * kPartUnits;
    unfinished.rows = {0, m};
    unfinished.result = result;
    unfinished.done = 0;
  }
  unfinished.all();
}

template <class Dot, int kParts, class Finish>
static void multiply_streamed(const PackedRows& rows, int64_t m, const char* weight, Range results, float* sums,
                              const Finish& finish) {
  const Tiles tiles(panel_tiles(m));
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
