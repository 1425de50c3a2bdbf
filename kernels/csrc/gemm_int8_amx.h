// Products of quantised rows with an int8 weight in AMX tiles, for the *_amx.cpp that includes this file (no include
// guard).

namespace tilerank::TR_RUNG {

// Memory that will be read in order, fetched bit by bit while something else is computed.
struct Stream {
  const char *at, *end;

  void fetch() {
    for (int64_t line = 0; line < 2; ++line, at += 64) {
      if (at < end) prefetch_l2(at);
    }
  }
};

// A row into tiles, while `ahead` is fetched. Returns the step.
template <class T>
static inline float quantise_into(const T* from, int64_t k, const PackedRows& to, int64_t row_tile, int64_t r,
                                  Stream& ahead) {
  return quantise_row(from, k, [&](int64_t t) {
    ahead.fetch();
    return reinterpret_cast<int8_t*>(to.tiles(t / to.panel, row_tile) + t % to.panel * kTileBytes + r * 64);
  });
}

// 32 sums of a row in two tiles
static inline std::array<Vec, 2> scaled_tiles(const float* sums, float step, const float* scales) {
  return {scaled(load_ints(sums), step, scales), scaled(load_ints(sums + kTileRows * kLanes), step, scales + kLanes)};
}

// The tiles that multiply_few uses.
static inline TileConfig few_row_tiles(int64_t m) {
  TileConfig config;
  for (int tile = 0; tile < 3; ++tile) config.set(tile, static_cast<int>(m), 64);
  for (int tile = 3; tile < 5; ++tile) config.set(tile, kTileRows, 64);
  return config;
}

// sums = a tile of rows x the block at w, which is read in order; returns where the next one is.
static inline const char* multiply_few(const char* rows, const char* w, int64_t k_tiles, float* sums) {
  tile_zero<0>();
  tile_zero<1>();
  for (int64_t t = 0; t < k_tiles; ++t, w += kBlockStep8) {
    for (int64_t line = 0; line < kBlockStep8; line += 64) prefetch_l2(w + kStreamAhead + line);
    tile_load<2>(rows + t * kTileBytes, 64);
    tile_load_stream<3>(w, 64);
    tile_load_stream<4>(w + kTileBytes, 64);
    tile_dot_int8<0, 2, 3>();
    tile_dot_int8<1, 2, 4>();
  }
  tile_store<0>(sums, 64);
  tile_store<1>(sums + kTileRows * kLanes, 64);
  return w;
}

}  // namespace tilerank::TR_RUNG
