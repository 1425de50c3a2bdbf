// attention with both products of bf16 on tiles, for prefill and decode alike: a tile sums in another order than
// vdpbf16ps does, and a row must have the same bits in both.
#ifndef TR_RUNG
#include <type_traits>

#include "attention_batch.h"
#define TR_ONLY_AMX
#define TR_SOURCE "attention_amx.cpp"
#include "foreach_isa.h"
#else
#include "amx.h"
#include "attention.h"

namespace tilerank::TR_RUNG {

// Tiles 0..3: sums of two row tiles times two lane groups; 4, 5: the row tiles; 6, 7: the lane groups.
template <int RowTiles, int Groups, class F>
static inline void for_sums(F&& f) {
  f(std::integral_constant<int, 0>{}, std::integral_constant<int, 0>{});
  if constexpr (Groups > 1) f(std::integral_constant<int, 0>{}, std::integral_constant<int, 1>{});
  if constexpr (RowTiles > 1) f(std::integral_constant<int, 1>{}, std::integral_constant<int, 0>{});
  if constexpr (RowTiles > 1 && Groups > 1) f(std::integral_constant<int, 1>{}, std::integral_constant<int, 1>{});
}

// One step of 32 summands: a is [16 * RowTiles][32], b and b2 are the groups' [16][16][2].
template <int RowTiles, int Groups>
static inline void step(const bf16* a, int64_t lda, const bf16* b, const bf16* b2) {
  tile_load<4>(a, lda * 2);
  if constexpr (RowTiles > 1) tile_load<5>(a + 16 * lda, lda * 2);
  tile_load<6>(b, 64);
  if constexpr (Groups > 1) tile_load<7>(b2, 64);
  for_sums<RowTiles, Groups>([](auto row, auto group) { tile_dot_bf16<row * 2 + group, 4 + row, 6 + group>(); });
}

template <int RowTiles, int Groups>
static inline void load_sums(const float* c, int64_t ldc) {
  for_sums<RowTiles, Groups>(
      [&](auto row, auto group) { tile_load<row * 2 + group>(c + row * 16 * ldc + group * 16, ldc * 4); });
}

template <int RowTiles, int Groups>
static inline void store_sums(float* c, int64_t ldc) {
  for_sums<RowTiles, Groups>(
      [&](auto row, auto group) { tile_store<row * 2 + group>(c + row * 16 * ldc + group * 16, ldc * 4); });
}

template <int RowTiles>
static void tile_scores(const bf16* q, const bf16* k_page, int64_t d, float* s) {
  load_sums<RowTiles, 2>(s, kChunk);
  int64_t i = 0;
  for (; i + 32 <= d; i += 32) step<RowTiles, 2>(q + i, kMaxDim, k_page + i * 16, k_page + (d + i) * 16);
  if (i < d) {
    // A tile is 32 dims high: the rest comes from a copy padded with zeros (what follows in the page may be anything).
    alignas(64) bf16 rest[2][32 * 16] = {};
    for (int group = 0; group < 2; ++group) {
      std::memcpy(rest[group], k_page + (group * d + i) * 16, static_cast<size_t>((d - i) * 16 * 2));
    }
    step<RowTiles, 2>(q + i, kMaxDim, rest[0], rest[1]);
  }
  store_sums<RowTiles, 2>(s, kChunk);
}

template <int RowTiles, int Groups>
static void tile_values(const bf16* p, const bf16* const* v_pages, int64_t pages, int64_t i, float* o) {
  load_sums<RowTiles, Groups>(o + i, kMaxDim);
  for (int64_t page = 0; page < pages; ++page) {
    const bf16* v = v_pages[page] + i * kBlock;
    step<RowTiles, Groups>(p + page * kBlock, kChunk, v, v + 16 * kBlock);
  }
  store_sums<RowTiles, Groups>(o + i, kMaxDim);
}

struct TileProducts {
  static void scores(const bf16* q, int64_t rows, const bf16* k_page, int64_t d, float* s) {
    rows > 16 ? tile_scores<2>(q, k_page, d, s) : tile_scores<1>(q, k_page, d, s);
  }
  static void values(const bf16* p, int64_t rows, const bf16* const* v_pages, int64_t pages, int64_t d, float* o) {
    int64_t i = 0;
    for (; i + 32 <= d; i += 32) {
      rows > 16 ? tile_values<2, 2>(p, v_pages, pages, i, o) : tile_values<1, 2>(p, v_pages, pages, i, o);
    }
    if (i < d) rows > 16 ? tile_values<2, 1>(p, v_pages, pages, i, o) : tile_values<1, 1>(p, v_pages, pages, i, o);
  }
};

static void attention(const Args& args, Team& team) {
  if (args.tensor(0).dtype == DType::f32) {
    attention_over<float, VectorProducts<float> >(args, team);
    return;
  }
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, 64);
  const Tiles tiles(config);
  attention_over<bf16, TileProducts>(args, team);
}
TR_KERNEL(attention)

}  // namespace tilerank::TR_RUNG
#endif
