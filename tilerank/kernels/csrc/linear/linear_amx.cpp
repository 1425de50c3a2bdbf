// Products with bf16 weights in AMX tiles.
#ifndef TR_RUNG
#include <array>

#include "core/entry.h"
#include "linear/pack.h"

#define TR_ONLY_AMX
#define TR_SOURCE "linear/linear_amx.cpp"
#include "simd/foreach_isa.h"

#else
#include "simd/blocks-inl.h"
#include "linear/epilogue-inl.h"
#include "linear/entries-inl.h"
#include "linear/gemm_amx-inl.h"
#include "linear/finish_amx-inl.h"
#include "linear/stream_amx-inl.h"
#include "linear/stream_rows_amx-inl.h"

namespace tilerank::TR_RUNG {

// With at most this many rows, or inputs, tiles are loaded from x itself. With more of both, the rows of a tile fall
// into the same sets of the L1 cache, and loading them for every block costs more than packing them once.
constexpr int64_t kDirectRows = 8, kDirectInputs = 2048;

static void pack_rows(const Tensor& x, const PackedRows& to, Team& team) {
  constexpr int64_t kPiece = 16;  // tiles
  const int64_t pieces = blocks(to.k_tiles, kPiece);
  const Range tasks = team.share(pieces * to.row_tiles);
  for (int64_t task = tasks.begin; task < tasks.end; ++task) {
    const int64_t first = task % pieces * kPiece;
    pack_row_tile(x, to, task / pieces, {first, std::min(first + kPiece, to.k_tiles)});
  }
}

// At most 16 rows. If they must be packed, every thread packs all of them for itself, which is cheaper than a barrier.
template <int kParts>
static void linear_few_rows(const Tensor& x, const Tensor& weight, const Epilogue& epilogue, Team& team) {
  const int64_t m = x.size[0], k = x.size[1], k_tiles = blocks(k, kTileK);
  StreamedRows rows{x.as<const char>(), x.stride[0] * 2, 64};
  if ((m > kDirectRows && k > kDirectInputs) || k % kTileK) {
    const PackedRows packed{static_cast<char*>(team.scratch(static_cast<size_t>(k_tiles * kTileBytes))), 1, k_tiles,
                            k_tiles};
    pack_row_tile(x, packed, 0, {0, k_tiles});
    rows = {packed.data, 64, kTileBytes};
  }
  const ProductFinish<kParts, Epilogue> finish{epilogue};
  const Tiles tiles(stream_tiles(m));
  const Range share = team.share(epilogue.results), own{share.begin * kParts, share.end * kParts};
  stream_blocks<Bf16Dot>(rows, m, weight.as<const char>(), own, k_tiles, stream_finish<kParts>(finish, own));
}

template <int kParts, class Finish>
static void linear_many_rows(int64_t m, const RowTiles& rows, const Blocking& blocking, const char* weight,
                             int64_t results, const Finish& finish, Team& team) {
  constexpr int64_t kOwnTiles = 64;
  const Tiles tiles(panel_tiles(kTileRows));
  float* const sums = static_cast<float*>(team.scratch(band_sums<kParts>(rows.packed, blocking) * sizeof(float)));
  const Grid grid(team, blocks(m, kTileRows), results, kOwnTiles);
  grid.for_stripes(blocking.stripe, [&](Range stripe) {
    multiply_stripe<Bf16Dot, kParts>(rows, stripe, weight, grid.results, blocking, m, sums, finish,
                                     stripe.end == grid.row_tiles.end);
  });
}

template <int kParts>
static void linear(const LinearArgs& args, const Tensor& weight, const Epilogue& epilogue, Team& team) {
  const Tensor& x = args.x;
  if (x.size[0] <= kTileRows) return linear_few_rows<kParts>(x, weight, epilogue, team);
  const int64_t row_tiles = blocks(x.size[0], kTileRows), k_tiles = blocks(x.size[1], kTileK);
  const bool streamed = streams_rows(row_tiles, k_tiles);
  const Blocking blocking = Blocking::of(row_tiles, k_tiles);
  const int64_t stride = x.stride[0] * 2;
  const bool plain =
      !streamed && stride % 128 == 64 && x.size[1] % kTileK == 0 && reinterpret_cast<uintptr_t>(x.data) % 64 == 0;
  const int64_t full = x.size[0] / kTileRows, plain_tiles = !plain ? 0 : full == row_tiles ? full : full / 2 * 2;
  const RowTiles rows{{args.scratch.as<char>(), row_tiles - plain_tiles, k_tiles, streamed ? k_tiles : blocking.panel},
                      x.as<const char>(),
                      stride,
                      plain_tiles};
  if (plain_tiles < row_tiles) {
    Tensor rest = x;
    rest.data = x.row<char>(plain_tiles * kTileRows * 2);
    rest.size[0] -= plain_tiles * kTileRows;
    pack_rows(rest, rows.packed, team);
    team.barrier();
  }
  epilogue.with_destination<kParts>([&]<class To>(const To& to) {
    const ProductFinish<kParts, To> finish{to};
    if (streamed) {
      float* const sums = static_cast<float*>(team.scratch(streamed_sums<kParts>() * sizeof(float)));
      return multiply_streamed<Bf16Dot, kParts>(rows.packed, x.size[0], weight.as<const char>(),
                                                team.share(epilogue.results), sums, finish);
    }
    linear_many_rows<kParts>(x.size[0], rows, blocking, weight.as<const char>(), epilogue.results, finish, team);
  });
}

// scratch: packed rows, round_up(m, 16) * round_up(k, 32) bf16, if m > 16
static void linear_bf16(const LinearArgs& args, const FloatWeight& w, Team& team) {
  const Epilogue epilogue(args);
  epilogue.parts == 2 ? linear<2>(args, w.data, epilogue, team) : linear<1>(args, w.data, epilogue, team);
}
TR_LINEAR(bf16, FloatWeight, linear_bf16)

}  // namespace tilerank::TR_RUNG
#endif
