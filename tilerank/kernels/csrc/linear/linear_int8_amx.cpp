// Products with int8 weights in AMX tiles.
#ifndef TR_RUNG
#include <array>
#include <type_traits>
#include <utility>

#include "core/cpu.h"
#include "core/entry.h"
#include "linear/int8.h"

#define TR_ONLY_AMX
#define TR_SOURCE "linear/linear_int8_amx.cpp"
#include "simd/foreach_isa.h"

#else
#include "simd/blocks-inl.h"
#include "linear/epilogue-inl.h"
#include "linear/entries-inl.h"
#include "linear/gemm_amx-inl.h"
#include "linear/finish_amx-inl.h"
#include "linear/int8_rows-inl.h"
#include "linear/stream_amx-inl.h"
#include "linear/gemm_int8_amx-inl.h"
#include "linear/gemm_int8-inl.h"
#include "linear/int8_stripes-inl.h"
#include "linear/int8_tiles_amx-inl.h"
#include "linear/int8_linear-inl.h"

namespace tilerank::TR_RUNG {

// At most 16 rows. Every thread quantises all of them for itself, while the first part of its weight is being
// prefetched; this is cheaper than a barrier.
template <int kParts>
static void few_rows(const Tensor& x, const Int8Weight& w, const Epilogue& epilogue, Team& team) {
  const char* const weight = w.codes.as<const char>();
  const int64_t m = x.size[0], k_tiles = blocks(x.size[1], kInt8TileK);
  const PackedRows rows{static_cast<char*>(team.scratch(static_cast<size_t>(k_tiles * kTileBytes))), 1, k_tiles,
                        k_tiles};
  QuantisedRow quantised[kTileRows];
  const Range own = team.share(epilogue.results);
  FirstBlocks ahead(weight, {own.begin * kParts, own.end * kParts}, k_tiles * kInt8BlockStep);
  for (int64_t r = 0; r < m; ++r) {
    quantised[r] = quantise_into(x.row<const bf16>(r), x.size[1], rows, 0, r, ahead);
  }
  const ProductFinish<kParts, Epilogue, Int8Scaling> finish{epilogue, {quantised, w.scales.as<const float>()}};
  stream_results<kParts>(rows, m, weight, own, finish);
}

template <int kParts>
static void many_rows(const LinearArgs& args, const Int8Weight& w, const Epilogue& epilogue, Team& team) {
  const Tensor& x = args.x;
  const int64_t m = x.size[0], row_tiles = blocks(m, kTileRows), k_tiles = blocks(x.size[1], kInt8TileK);
  const Blocking blocking = Blocking::of(row_tiles, k_tiles);
  const PackedRows rows{args.scratch.as<char>(), row_tiles, k_tiles, blocking.panel};
  QuantisedRow* const quantised = reinterpret_cast<QuantisedRow*>(rows.data + row_tiles * k_tiles * kTileBytes);
  const Range share = team.share(m);
  FirstBlocks none(nullptr, {0, 0}, 0);
  for (int64_t row = share.begin; row < share.end; ++row) {
    quantised[row] = quantise_into(x.row<const bf16>(row), x.size[1], rows, row / kTileRows, row % kTileRows, none);
  }
  team.barrier();

  const Tiles tiles(panel_tiles(kTileRows));
  float* const sums = static_cast<float*>(team.scratch(band_sums<kParts>(rows, blocking) * sizeof(float)));
  const Grid grid(team, row_tiles, epilogue.results, 64);
  epilogue.with_destination<kParts>([&]<class To>(const To& to) {
    const ProductFinish<kParts, To, Int8Scaling> finish{to, {quantised, w.scales.as<const float>()}};
    grid.for_stripes(blocking.stripe, [&](Range stripe) {
      multiply_stripe<Int8Dot, kParts>(rows, stripe, w.codes.as<const char>(), grid.results, blocking, m, sums, finish,
                                       stripe.end == grid.row_tiles.end);
    });
  });
}

// scratch: the codes of x, round_up(m, 16) * round_up(k, 64) bytes, then a QuantisedRow for each row
static void linear_token_int8(const LinearArgs& args, const Int8Weight& w, Team& team) {
  const Epilogue epilogue(args);
  const bool few = args.x.size[0] <= kTileRows;
  if (epilogue.parts == 2) {
    few ? few_rows<2>(args.x, w, epilogue, team) : many_rows<2>(args, w, epilogue, team);
  } else {
    few ? few_rows<1>(args.x, w, epilogue, team) : many_rows<1>(args, w, epilogue, team);
  }
}
TR_LINEAR(token_int8, Int8Weight, linear_token_int8)

TR_LINEAR(int8, Int8Weight, linear_int8_tiles<Int8Form>)

}  // namespace tilerank::TR_RUNG
#endif
