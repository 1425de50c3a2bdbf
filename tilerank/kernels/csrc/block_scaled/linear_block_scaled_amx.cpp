// Products with block-scaled weights in AMX tiles.
#ifndef TR_RUNG
#include <array>

#include "block_scaled/block_scaled.h"
#define TR_ONLY_AMX
#define TR_SOURCE "block_scaled/linear_block_scaled_amx.cpp"
#include "simd/foreach_isa.h"
#else
#include "simd/blocks-inl.h"
#include "linear/epilogue-inl.h"
#include "linear/entries-inl.h"
#include "block_scaled/block_scaled_amx-inl.h"
#include "linear/finish_amx-inl.h"
#include "block_scaled/block_scaled_stream_amx-inl.h"

namespace tilerank::TR_RUNG {

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

// At most 16 rows. If they must be packed, every thread packs all of them for itself, while the first part of its
// weight is being prefetched; this is cheaper than a barrier.
template <int kParts, class Format>
static void linear_few_rows(const Tensor& x, const Format& weight, const Epilogue& epilogue, Team& team) {
  const int64_t m = x.size[0], k = x.size[1], k_tiles = blocks(k, kTileK);
  const Range share = team.share(epilogue.results), own{share.begin * kParts, share.end * kParts};
  if (own.begin == own.end) return;
  ExpandedPairs<Format> expanded(weight, own, k_tiles);
  const bool packed = m > 1 || k % kTileK;
  const size_t bytes = packed ? FewRows::bytes(m, k) : 0;
  char* const memory =
      static_cast<char*>(team.scratch(bytes + static_cast<size_t>(weight.k_blocks * kTileRows) * sizeof(float)));
  float* const k_block_sums = reinterpret_cast<float*>(memory + bytes);
  const auto row = [&](int64_t r) { return x.row<const bf16>(r); };
  const FewRows rows = packed ? FewRows::pack(row, m, k, memory, k_block_sums)
                              : FewRows{x.as<const char>(), 64, 64, m, k_tiles, k_block_sums};
  const Tiles tiles(block_scaled_stream_tiles(m));
  stream_block_scaled<kParts>(rows, weight, own, expanded, ProductFinish<kParts, Epilogue>{epilogue});
}

template <int kParts, class Format>
static void linear_many_rows(const LinearArgs& args, const Format& weight, const Epilogue& epilogue, Team& team) {
  const Tensor& x = args.x;
  const int64_t m = x.size[0], panel = BlockScaledBlocking::panel(weight);
  const PackedRows rows{args.scratch.as<char>(), blocks(m, kTileRows), blocks(x.size[1], kTileK), panel};
  pack_rows(x, rows, team);
  team.barrier();
  const Tiles tiles(panel_tiles(kTileRows));
  const BlockScaledTileScratch memory(team.scratch(BlockScaledTileScratch::bytes(panel)), panel);
  const Grid grid(team, rows.row_tiles, epilogue.results, 32);
  grid.for_stripes(BlockScaledBlocking::kStripe, [&](Range stripe) {
    multiply_block_scaled_stripe<kParts>(rows, stripe, weight, grid.results, m, memory,
                                         ProductFinish<kParts, Epilogue>{epilogue});
  });
}

template <int kParts, class Format>
static void linear(const LinearArgs& args, const Format& weight, const Epilogue& epilogue, Team& team) {
  if (args.x.size[0] <= kTileRows) return linear_few_rows<kParts>(args.x, weight, epilogue, team);
  linear_many_rows<kParts>(args, weight, epilogue, team);
}

// scratch: packed rows, round_up(m, 16) * round_up(k, 32) bf16, if m > 16
template <class Format>
static void linear(const LinearArgs& args, const typename Format::Weight& w, Team& team) {
  const Epilogue epilogue(args);
  const Format weight(w);
  epilogue.parts == 2 ? linear<2>(args, weight, epilogue, team) : linear<1>(args, weight, epilogue, team);
}

TR_LINEAR(int4, OutputScaledWeight, linear<Int4>)
TR_LINEAR(mxfp4, OutputScaledWeight, linear<Mxfp4>)
TR_LINEAR(fp8, ByteCodesWeight, linear<Fp8>)
TR_LINEAR(block_int8, ByteCodesWeight, linear<BlockInt8>)
TR_LINEAR(channel_fp8, OutputScaledWeight, linear<ChannelFp8>)
TR_LINEAR(group_int8, OutputScaledWeight, linear<GroupInt8>)

}  // namespace tilerank::TR_RUNG
#endif
