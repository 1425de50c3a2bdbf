#ifndef TR_RUNG
#include "core/peaks.h"

#define TR_ONLY_AMX
#undef TR_LEFT_OUT  // what follows is called by the name of its rung
#define TR_SOURCE "core/peaks_amx.cpp"
#include "simd/foreach_isa.h"

#else
#include "simd/amx-inl.h"

namespace tilerank::TR_RUNG {

// Six independent sums, more than the latency of a product divided by its throughput.
template <bool kInt8>
static void multiply(int64_t rounds) {
  for (int64_t i = 0; i < rounds; ++i) {
    if constexpr (kInt8) {
      tile_dot_int8<0, 6, 7>();
      tile_dot_int8<1, 6, 7>();
      tile_dot_int8<2, 6, 7>();
      tile_dot_int8<3, 6, 7>();
      tile_dot_int8<4, 6, 7>();
      tile_dot_int8<5, 6, 7>();
    } else {
      tile_dot_bf16<0, 6, 7>();
      tile_dot_bf16<1, 6, 7>();
      tile_dot_bf16<2, 6, 7>();
      tile_dot_bf16<3, 6, 7>();
      tile_dot_bf16<4, 6, 7>();
      tile_dot_bf16<5, 6, 7>();
    }
  }
}

double multiply_tiles(int64_t products, bool int8) {
  alignas(64) uint16_t ones[512];
  std::fill_n(ones, 512, uint16_t{0x3f80});
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, 64);
  const Tiles tiles(config);
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  tile_zero<4>();
  tile_zero<5>();
  tile_load<6>(ones, 64);
  tile_load<7>(ones, 64);
  const int64_t rounds = products / 6;
  int8 ? multiply<true>(rounds) : multiply<false>(rounds);
  // 16 x 16 sums of 32 (bf16) or 64 (int8) products each
  return static_cast<double>(rounds * 6) * 16 * 16 * (int8 ? 64 : 32) * 2;
}

}  // namespace tilerank::TR_RUNG
#endif
