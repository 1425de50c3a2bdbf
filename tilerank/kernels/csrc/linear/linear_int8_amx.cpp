// Products with int8 weights in AMX tiles.
#ifndef TR_RUNG
#include <array>

#include "linear/int8.h"
#include "core/kernel.h"

#define TR_ONLY_AMX
#define TR_SOURCE "linear/linear_int8_amx.cpp"
#include "simd/foreach_isa.h"

#else
#include "linear/epilogue-inl.h"
#include "linear/gemm_amx-inl.h"
#include "linear/int8_rows-inl.h"
#include "linear/stream_amx-inl.h"
#include "linear/gemm_int8_amx-inl.h"

namespace tilerank::TR_RUNG {

// Scales sums in tiles and passes them to the epilogue.
template <int kParts>
struct Int8Finish {
  const Epilogue& epilogue;
  const float *row_scales, *scales;

  void write(const float* const (&parts)[kParts], Range rows, int64_t result) const {
    for_sums(rows, [&](int64_t row, int64_t i) {
      const auto sums = [&](int part) {
        return scaled_tiles(parts[part] + i, row_scales[row], scales + (result * kParts + part) * kBlockN);
      };
      epilogue.write(row, result, sums(0).data(), kParts == 2 ? sums(kParts - 1).data() : nullptr);
    });
  }
};

// Int8Finish for Epilogue::streams_plain(), in few instructions (see StreamFinish in linear_amx.cpp).
template <int kParts>
struct Int8StreamFinish {
  bf16* out;
  int64_t stride;
  const float *row_scales, *scales;

  void write(const float* const (&parts)[kParts], Range rows, int64_t result) const {
    const float* const scale = scales + result * kParts * kBlockN;
    for_sums(rows, [&](int64_t row, int64_t i) {
      const auto value = [&](int part) {
        return scaled_tiles(parts[part] + i, row_scales[row], scale + part * kBlockN);
      };
      auto sums = value(0);
      if constexpr (kParts == 2) {
        const auto up = value(1);
        for (int v = 0; v < 2; ++v) sums[v] = silu(sums[v]) * up[v];
      }
      _mm512_stream_si512(reinterpret_cast<__m512i*>(out + row * stride + result * kBlockN),
                          (__m512i)_mm512_cvtne2ps_pbh(sums[1].v, sums[0].v));
    });
  }
};

// At most 16 rows. Every thread quantises all of them for itself, while the first part of its weight is being
// prefetched; this is cheaper than a barrier.
template <int kParts>
static void few_rows(const Args& args, const Epilogue& epilogue, Team& team) {
  const Tensor& x = args.tensor(0);
  const char* const weight = args.tensor(5).as<const char>();
  const int64_t m = x.size[0], k_tiles = blocks(x.size[1], kInt8TileK);
  const PackedRows rows{static_cast<char*>(team.scratch(static_cast<size_t>(k_tiles * kTileBytes))), 1, k_tiles,
                        k_tiles};
  float row_scales[kTileRows];
  const Range own = team.share(epilogue.results);
  FirstBlocks ahead(weight, {own.begin * kParts, own.end * kParts}, k_tiles * kInt8BlockStep);
  for (int64_t r = 0; r < m; ++r) {
    row_scales[r] = quantise_into(x.row<const bf16>(r), x.size[1], rows, 0, r, ahead);
  }
  const Int8Finish<kParts> finish{epilogue, row_scales, args.tensor(6).as<const float>()};
  stream_results<kParts>(rows, m, weight, own, finish);
}

template <int kParts>
static void many_rows(const Args& args, const Epilogue& epilogue, Team& team) {
  const Tensor& x = args.tensor(0);
  const int64_t m = x.size[0], row_tiles = blocks(m, kTileRows), k_tiles = blocks(x.size[1], kInt8TileK);
  const Blocking blocking = Blocking::of(row_tiles, k_tiles);
  const PackedRows rows{args.tensor(4).as<char>(), row_tiles, k_tiles, blocking.panel};
  float* const row_scales = reinterpret_cast<float*>(rows.data + row_tiles * k_tiles * kTileBytes);
  const Range quantised = team.share(m);
  FirstBlocks none(nullptr, {0, 0}, 0);
  for (int64_t row = quantised.begin; row < quantised.end; ++row) {
    row_scales[row] = quantise_into(x.row<const bf16>(row), x.size[1], rows, row / kTileRows, row % kTileRows, none);
  }
  team.barrier();

  const Tiles tiles(panel_tiles(kTileRows));
  float* const sums = static_cast<float*>(team.scratch(band_sums<kParts>(rows, blocking) * sizeof(float)));
  // Threads form a grid. Rows are split first, as long as each thread keeps enough of them to amortise reading the
  // weight; then outputs.
  int row_threads = 1;
  while (team.count % (row_threads * 2) == 0 && row_tiles >= row_threads * 2 * 64) row_threads *= 2;
  const Team row_team(nullptr, team.index % row_threads, row_threads);
  const Team column_team(nullptr, team.index / row_threads, team.count / row_threads);
  const Range own_rows = row_team.share(row_tiles, 2), own = column_team.share(epilogue.results);
  const auto multiply = [&](const auto& finish) {
    for (int64_t tile = own_rows.begin; tile < own_rows.end; tile += blocking.stripe) {
      const Range stripe{tile, std::min(tile + blocking.stripe, own_rows.end)};
      multiply_stripe<Int8Dot, kParts>(rows, stripe, args.tensor(5).as<const char>(), own, blocking, m, sums, finish,
                                       stripe.end == own_rows.end);
    }
  };
  const float* const scales = args.tensor(6).as<const float>();
  if (epilogue.streams_plain()) {
    multiply(Int8StreamFinish<kParts>{epilogue.out.as<bf16>(), epilogue.out.stride[0], row_scales, scales});
  } else {
    multiply(Int8Finish<kParts>{epilogue, row_scales, scales});
  }
}

// operands: see int8.h, whose sums are unused; scratch: the codes of x, round_up(m, 16) * round_up(k, 64) bytes, then
// [m] fp32 row scales
static void linear_int8(const Args& args, Team& team) {
  const Epilogue epilogue(args);
  const bool few = args.tensor(0).size[0] <= kTileRows;
  if (epilogue.parts == 2) {
    few ? few_rows<2>(args, epilogue, team) : many_rows<2>(args, epilogue, team);
  } else {
    few ? few_rows<1>(args, epilogue, team) : many_rows<1>(args, epilogue, team);
  }
}
TR_KERNEL(linear_int8)

}  // namespace tilerank::TR_RUNG
#endif
