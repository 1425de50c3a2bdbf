#ifndef TR_RUNG
#include "core/selftest.h"

#define TR_ONLY_AMX
#undef TR_LEFT_OUT  // what follows is called by the name of its rung
#define TR_SOURCE "core/selftest_amx.cpp"
#include "simd/foreach_isa.h"

#else
#include "simd/amx-inl.h"

namespace tilerank::TR_RUNG {

// A 16x32 tile of ones times a 32x16 tile of twos is 64 everywhere, in both element types.
bool self_test() {
  alignas(64) uint16_t a[16 * 32], b[16 * 32];
  alignas(64) float c[16 * 16];
  std::fill_n(a, 16 * 32, uint16_t{0x3f80});
  std::fill_n(b, 16 * 32, uint16_t{0x4000});
  TileConfig config;
  for (int tile = 0; tile < 3; ++tile) config.set(tile, 16, 64);
  Tiles tiles(config);
  tile_zero<0>();
  tile_load<1>(a, 64);
  tile_load<2>(b, 64);
  tile_dot_bf16<0, 1, 2>();
  tile_store<0>(c, 64);
  return std::all_of(c, c + 16 * 16, [](float x) { return x == 64.0f; });
}

}  // namespace tilerank::TR_RUNG
#endif
