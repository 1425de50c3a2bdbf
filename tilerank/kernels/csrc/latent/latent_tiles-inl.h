// The products of latent attention in AMX tiles (included by latent_task-inl.h; no include guard).
//
// Tiles 0 to 3: sums of two row tiles x two groups of 16 lanes; 4, 5: the row tiles; 6, 7: the lane groups. Rows that
// pad a tile hold anything: no row of a product depends on another.

namespace tilerank::TR_RUNG {

constexpr int64_t kLatentTile = 16 * 32;  // bf16 elements of a tile

static inline TileConfig latent_tiles() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, 64);
  return config;
}

// Calls f(r, row tiles) for every one or two tiles of rows.
template <class F>
static inline void for_row_tiles(int64_t rows, const F& f) {
  int64_t r = 0;
  for (; r + 16 < rows; r += 32) f(r, std::integral_constant<int, 2>{});
  if (r < rows) f(r, std::integral_constant<int, 1>{});
}

// Sums at c, `stride` elements apart.
template <int RowTiles>
static inline void load_sums(const float* c, int64_t stride) {
  tile_load<0>(c, stride * 4);
  tile_load<1>(c + 16, stride * 4);
  if constexpr (RowTiles > 1) {
    tile_load<2>(c + 16 * stride, stride * 4);
    tile_load<3>(c + 16 * stride + 16, stride * 4);
  }
}
template <int RowTiles>
static inline void zero_sums() {
  tile_zero<0>();
  tile_zero<1>();
  if constexpr (RowTiles > 1) {
    tile_zero<2>();
    tile_zero<3>();
  }
}
template <int RowTiles>
static inline void store_sums(float* c, int64_t stride) {
  tile_store<0>(c, stride * 4);
  tile_store<1>(c + 16, stride * 4);
  if constexpr (RowTiles > 1) {
    tile_store<2>(c + 16 * stride, stride * 4);
    tile_store<3>(c + 16 * stride + 16, stride * 4);
  }
}

// One step of 32 summands; a: rows `a_stride` elements apart; b, b2: the lane groups.
template <int RowTiles>
static inline void latent_step(const bf16* a, int64_t a_stride, const bf16* b, const bf16* b2) {
  tile_load<4>(a, a_stride * 2);
  tile_load<6>(b, 64);
  tile_dot_bf16<0, 4, 6>();
  tile_load<7>(b2, 64);
  tile_dot_bf16<1, 4, 7>();
  if constexpr (RowTiles > 1) {
    tile_load<5>(a + 16 * a_stride, a_stride * 2);
    tile_dot_bf16<2, 5, 6>();
    tile_dot_bf16<3, 5, 7>();
  }
}

// s[rows][32 tokens] = or, if `accumulate`, += q k^T. keys: [2][dims / 2][16][2], the halves `half` elements apart.
// dims: a multiple of 32.
template <int64_t Dims>
static void tile_scores(LeftRows<bf16, Dims> q, int64_t rows, const bf16* keys, int64_t half, int64_t dims,
                        bool accumulate, float* s, int64_t s_stride, LinePrefetch next) {
  for_row_tiles(rows, [&](int64_t r, auto row_tiles) {
    const bf16* const a = q.from(r).at;
    float* const c = s + r * s_stride;
    accumulate ? load_sums<row_tiles>(c, s_stride) : zero_sums<row_tiles>();
    for (int64_t i = 0; i < dims; i += 32) {
      latent_step<row_tiles>(a + i, q.kStride, keys + i * 16, keys + half + i * 16);
      for (int line = 0; line < 32; ++line, next.at += next.step) _mm_prefetch(next.at, _MM_HINT_T0);
    }
    store_sums<row_tiles>(c, s_stride);
    next.step = 0;  // the first rows have prefetched all
  });
}

// o[rows][dims] += p v over `pages` pages. values: [dims / 16][tokens / 2][16][2], the groups `group` elements apart.
// dims: a multiple of 32.
template <int64_t Dims>
static void tile_values(LeftRows<bf16, Dims> p, int64_t rows, const bf16* values, int64_t group, int64_t pages,
                        int64_t dims, float* o, LinePrefetch next) {
  for_row_tiles(rows, [&](int64_t r, auto row_tiles) {
    const bf16* const a = p.from(r).at;
    for (int64_t i = 0; i < dims; i += 32) {
      const bf16* const v = values + i / 16 * group;
      float* const c = o + r * dims + i;
      load_sums<row_tiles>(c, dims);
      for (int64_t page = 0; page < pages; ++page) {
        const bf16* const b = v + page * kLatentTile;
        latent_step<row_tiles>(a + page * kPageTokens, p.kStride, b, b + group);
        for (int line = 0; line < 32; ++line, next.at += next.step) _mm_prefetch(next.at, _MM_HINT_T0);
      }
      store_sums<row_tiles>(c, dims);
    }
    next.step = 0;
  });
}

}  // namespace tilerank::TR_RUNG
