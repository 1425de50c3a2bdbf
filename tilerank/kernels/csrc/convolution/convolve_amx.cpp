// convolve in AMX tiles.
//
// A tile of rows is found at any shift, where rows are or in a packed stripe, so that no tap needs rows of its own. Two
// by two tiles of sums accumulate over the inputs in pieces of kTileK and, within a piece, over the taps, whose rows
// are still in the L1 cache; the weight streams from L2. The order does not depend on the number of rows, so neither do
// the bits of a row.
#ifndef TR_RUNG
#include <array>
#include <numeric>
#include <type_traits>

#include "core/entry.h"
#include "linear/pack.h"

#define TR_ONLY_AMX
#define TR_SOURCE "convolution/convolve_amx.cpp"
#include "simd/foreach_isa.h"

#else
#include "simd/blocks-inl.h"
#include "linear/gemm_amx-inl.h"
#include "convolution/finish-inl.h"
#include "convolution/stripes-inl.h"

namespace tilerank::TR_RUNG {

// Where the K-tiles of a stripe of rows begin; a tap is `dilation` rows away from the one before it.
class ShiftedTiles {
 public:
  const int64_t m, taps, dilation, pieces;  // m: rows of the result; pieces: K-tiles of a tap

  // x: [m + (taps - 1) * dilation, c]
  ShiftedTiles(const Tensor& x, int64_t taps, int64_t dilation)
      : m(x.size[0] - (taps - 1) * dilation),
        taps(taps),
        dilation(dilation),
        pieces(blocks(x.size[1], kTileK)),
        x_(x),
        before_((taps - 1) * dilation),
        rows_(std::clamp(kStripeBytes / (pieces * 64) - before_, kFewestRows, kMostRows) / kPairRows * kPairRows),
        row_tiles_(blocks(rows_ + before_, kTileRows)),
        plain_(reads_plainly(x, before_)) {}

  int64_t stripes() const { return blocks(m, rows_); }
  Range rows(int64_t stripe) const { return {stripe * rows_, std::min((stripe + 1) * rows_, m)}; }
  size_t bytes() const { return static_cast<size_t>(pieces * row_tiles_ * kTileBytes); }

  // Returns the place of the first tap. Packs the stripe unless its rows are read from x itself: packed rows may be
  // followed by others with undefined contents, which fill the last tile.
  RowTiles::Place place(int64_t stripe, char* memory) const {
    const auto [begin, end] = rows(stripe);
    Tensor own = x_;
    own.data = x_.row<bf16>(begin);
    own.size[0] = end - begin + before_;
    if (plain_ && (m < kTileRows || (end - begin) % kTileRows == 0)) {
      return {own.as<const char>(), own.stride[0] * 2, 64, kTileRows * own.stride[0] * 2};
    }
    const PackedRows packed{memory, row_tiles_, pieces, 1};
    for (int64_t tile = 0; tile < blocks(own.size[0], kTileRows); ++tile) {
      pack_row_tile(own, packed, tile, {0, pieces});
    }
    return {memory, 64, row_tiles_ * kTileBytes, kTileBytes};
  }

 private:
  static constexpr int64_t kPairRows = 2 * kTileRows, kFewestRows = 2 * kPairRows, kMostRows = 8 * kPairRows;

  // Rows are read from x itself if they consist of whole cache lines, and if what two row tiles read of a piece leaves
  // half of the 12 lines of a set of the L1 cache to the weight: rows a power of two apart share few sets.
  static bool reads_plainly(const Tensor& x, int64_t before) {
    constexpr int64_t kSets = 64, kLines = 6;
    const int64_t stride = x.stride[0] * 2;
    const bool whole = x.size[1] % kTileK == 0 && stride % 64 == 0 && reinterpret_cast<uintptr_t>(x.data) % 64 == 0;
    return whole && kPairRows + before <= kLines * kSets / std::gcd(stride / 64, kSets);
  }

  const Tensor& x_;
  const int64_t before_, rows_, row_tiles_;  // rows_: results of a stripe; row_tiles_: of a packed stripe
  const bool plain_;
};

// The sums of row tiles with blocks of the weight. Those of a pass are finished while the products of the next one run.
class TapProducts {
 public:
  TapProducts(const Finish& finish, const ShiftedTiles& rows)
      : finish_{finish},
        unfinished_{&finish_},
        taps_(rows.taps),
        dilation_(rows.dilation),
        tap_bytes_(rows.pieces * kBlockStep),
        steps_(rows.pieces * rows.taps),
        rows_a_step_(blocks(2 * kTileRows, std::max<int64_t>(steps_ - 1, 1))) {}

  // Multiplies `rows`, of which the first is at `place`, with a block of the weight. Several pairs of row tiles
  // prefetch the next block meanwhile; a single pair reads the weight at the rate of memory, and prefetches a few steps
  // ahead.
  void multiply(RowTiles::Place place, Range rows, const char* weight, int64_t block, int64_t next) {
    const int64_t bytes = steps_ * kBlockStep, pairs = blocks(rows.end - rows.begin, 2 * kTileRows);
    const int64_t fetched = blocks(kBlockStep / 64, pairs) * 64;
    for (int64_t pair = 0; pair < pairs; ++pair, place.data += 2 * place.second) {
      const Range own{rows.begin + pair * 2 * kTileRows, std::min(rows.begin + (pair + 1) * 2 * kTileRows, rows.end)};
      const bool two = own.end - own.begin > kTileRows;
      const int64_t ahead =
          pairs > 1 ? (next - block) * bytes + pair * fetched : blocks(kStreamAhead / kBlockStep, taps_) * kBlockStep;
      two ? pass<2>(place, weight + block * bytes, ahead, fetched)
          : pass<1>(place, weight + block * bytes, ahead, fetched);
      unfinished_.all();
      before_ = {sums_, two ? 2 : 1};
      unfinished_ = {&finish_, own, block, {sums_}};
    }
  }

  void complete() {
    before_.store_all();
    unfinished_.all();
  }

 private:
  // Finish for sums in tiles.
  struct TileFinish {
    const Finish& finish;

    void write(const float* const (&parts)[1], Range rows, int64_t block) const {
      for_sums(rows, [&](int64_t row, int64_t i) {
        finish.write(row, 1, block * kBlockN, parts[0] + i, kTileRows * kLanes);
      });
    }
  };

  // Multiplies one or two row tiles with a block. At every step, `fetched` bytes are prefetched that are `ahead` bytes
  // from the weight in use.
  template <int kRowTiles>
  void pass(const RowTiles::Place& rows, const char* weight, int64_t ahead, int64_t fetched) {
    const int64_t shift = dilation_ * rows.row_stride, taps = taps_, tap_bytes = tap_bytes_;
    const int64_t next_piece = rows.tile_step - (taps - 1) * shift, next_bytes = kBlockStep - (taps - 1) * tap_bytes;
    const char *x = rows.data, *w = weight;
    int64_t tap = 0;
    const auto step = [&](auto first) __attribute__((always_inline)) {
      tile_load<4>(x, rows.row_stride);
      tile_load_stream<6>(w, 64);
      tile_load_stream<7>(w + kTileBytes, 64);
      if constexpr (kRowTiles == 2) tile_load<5>(x + rows.second, rows.row_stride);
      for (const char *line = w + ahead, *const end = line + fetched; line != end; line += 64) prefetch_l2(line);
      ++tap;
      x += tap < taps ? shift : next_piece;
      w += tap < taps ? tap_bytes : next_bytes;
      if (tap == taps) tap = 0;
      if (first) begin<0>();
      tile_dot_bf16<0, 4, 6>();
      if (first) begin<1>();
      tile_dot_bf16<1, 4, 7>();
      if (!first) {
        for (int64_t i = 0; i < rows_a_step_ && unfinished_.any(); ++i) unfinished_.row();
      }
      if (first) begin<2>();
      if constexpr (kRowTiles == 2) tile_dot_bf16<2, 5, 6>();
      if (first) begin<3>();
      if constexpr (kRowTiles == 2) tile_dot_bf16<3, 5, 7>();
    };
    step(std::true_type{});
    for (int64_t t = 1; t < steps_; ++t) step(std::false_type{});
  }

  template <int T>
  void begin() const {
    before_.store<T>();
    tile_zero<T>();
  }

  const TileFinish finish_;
  PendingRows<1, TileFinish> unfinished_;
  InTiles before_{nullptr, 0};
  const int64_t taps_, dilation_, tap_bytes_, steps_;  // tap_bytes_: of a block's weights of a tap
  const int64_t rows_a_step_;                          // that are finished at a step of the next pass
  alignas(64) float sums_[kPairSums];
};

TR_ENTRY(convolve_bf16, Team& team, const Tensor& x, const Tensor& bias, int64_t taps, int64_t dilation,
         const Tensor& scale, const Tensor& residual, const Tensor& out, const Tensor& frequency,
         const Tensor& magnitude, const Tensor& activated, const FloatWeight& w) {
  const Finish finish{bias, scale, residual, out, frequency, magnitude, activated};
  const ShiftedTiles rows(x, taps, dilation);
  char* const memory = static_cast<char*>(team.scratch(rows.bytes()));
  const Tiles tiles(panel_tiles(rows.m));
  TapProducts products(finish, rows);
  RowTiles::Place place{};
  for_stripes(
      rows.stripes(), blocks(finish.columns, kBlockN), team,
      [&](int64_t stripe) { place = rows.place(stripe, memory); },
      [&](int64_t stripe, int64_t block, int64_t next) {
        products.multiply(place, rows.rows(stripe), w.data.as<const char>(), block, next);
      });
  products.complete();
}

}  // namespace tilerank::TR_RUNG
#endif
