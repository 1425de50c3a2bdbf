// Products of rows with the weights of grouped.h in AMX tiles, for the *_amx.cpp that includes this file.
#pragma once
#include "gemm_amx.h"
#include "grouped_formats.h"

namespace tilerank::TR_RUNG {

// Every group's products are summed in tiles of 32 inputs in order, from zero; group by group, in order, that sum less
// zero * (sum of the inputs) is multiplied with the scale and added, fused. So do few rows and many, and a row's bits
// do not depend on its batch.

// The sum of `tiles` tiles of one row.
static inline float sum_of_inputs(const char* row, int64_t tile_stride, int64_t tiles) {
  Vec even = zero(), odd = zero();
  for (int64_t t = 0; t < tiles; ++t) {
    const __m512i pairs = _mm512_loadu_si512(row + t * tile_stride);
    even = even + Vec{_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
    odd = odd + Vec{_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  return sum(even + odd);
}

// At most 16 rows in tiles of 32 inputs, padded with zeros.
struct FewRows {
  const char* data;
  int64_t row_stride, tile_stride;  // bytes
  int64_t m, k_tiles;
  float* group_sums;  // [groups][16], where the weight has zeros

  template <class Format>
  void add_up(const Format& weight) const {
    for (int64_t group = 0; group < weight.groups; ++group) {
      const int64_t first = group * weight.group_tiles, tiles = std::min(weight.group_tiles, k_tiles - first);
      for (int64_t r = 0; r < m; ++r) {
        group_sums[group * kTileRows + r] =
            sum_of_inputs(data + r * row_stride + first * tile_stride, tile_stride, tiles);
      }
    }
  }
};

static inline TileConfig few_tiles(int64_t rows) {
  TileConfig config;
  for (int tile = 0; tile < 5; ++tile) config.set(tile, static_cast<int>(rows), 64);
  config.set(5, kTileRows, 64);
  return config;
}

// Groups that are multiplied before the next outputs' turn, so that rows stay in the first-level cache.
template <class Format>
static int64_t few_rows_panel(const Format& weight, int64_t m) {
  constexpr int64_t kRowBytes = 16 << 10;
  return std::max<int64_t>(1, kRowBytes / (m * 64) / weight.group_tiles);
}

// The values of some blocks, expanded tile by tile in the order in which few rows are multiplied: panel by panel, half
// by half. A tile is expanded some steps before it is wanted, when its stores have reached the cache.
template <class Format>
class Expansion {
 public:
  // `after`: what will be read next, fetched as well, or null.
  Expansion(const Format& weight, Range blocks, int64_t k_tiles, int64_t panel, const char* after)
      : weight_(weight),
        after_(after),
        first_(blocks.begin * 2),
        halves_((blocks.end - blocks.begin) * 2),
        panel_(panel * weight.group_tiles),
        k_tiles_(k_tiles),
        pieces_(tilerank::blocks(k_tiles, panel_) * halves_),
        // Pieces that are fetched from memory before they are wanted: at least 16 KiB.
        ahead_(tilerank::blocks(16 << 10, panel_ * Format::kPackedTile)) {
    start();
    for (uint32_t i = 0; i < kAhead; ++i) expand();
  }

  const bf16* next() {
    expand();
    return ring_[wanted_++ % kRing];
  }

 private:
  static constexpr uint32_t kAhead = 4, kRing = 8;  // tiles

  const char* piece(int64_t i) const { return weight_.tile(first_ + i % halves_, i / halves_ * panel_); }

  void start() {
    from_ = piece(piece_);
    const int64_t fetched = piece_ + ahead_;
    fetched_ = fetched < pieces_ || !after_ ? piece(std::min(fetched, pieces_ - 1))
                                            : after_ + (fetched - pieces_) * panel_ * Format::kPackedTile;
    left_ = std::min(panel_, k_tiles_ - piece_ / halves_ * panel_);
  }

  void expand() {
    if (left_ == 0) {
      piece_ = std::min(piece_ + 1, pieces_ - 1);
      start();
    }
    for (int64_t line = 0; line < Format::kPackedTile; line += 64) prefetch_l2(fetched_ + line);
    Format::expand(from_, ring_[expanded_++ % kRing]);
    from_ += Format::kPackedTile;
    fetched_ += Format::kPackedTile;
    --left_;
  }

  alignas(64) bf16 ring_[kRing][kTile];
  const Format& weight_;
  const char* const after_;
  const int64_t first_, halves_, panel_, k_tiles_, pieces_, ahead_;
  int64_t piece_ = 0, left_ = 0;
  uint32_t expanded_ = 0, wanted_ = 0;
  const char *from_ = nullptr, *fetched_ = nullptr;
};

constexpr int64_t kSumTiles = 4, kLag = 2;  // groups on their way, and of them those whose sums are not waited for

// sums[R][16] (+)= rows x 16 outputs over some groups.
template <int R, bool kZeros, class Format>
static inline void multiply_half(const FewRows& rows, const Format& weight, int64_t half, Range groups, float* sums,
                                 Expansion<Format>& expansion) {
  alignas(64) float fresh[kSumTiles][R * kLanes];
  Vec total[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) total[r] = groups.begin == 0 ? zero() : load(sums + r * kLanes);

  const auto add = [&](int64_t group) {
    const float* const from = fresh[(group - groups.begin) % kSumTiles];
    const Vec scale = weight.scale(half, group);
    if constexpr (kZeros) {
      const Vec less = weight.negative_zero(half, group);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Vec inputs = set(rows.group_sums[group * kTileRows + r]);
        total[r] = fma(fma(less, inputs, load(from + r * kLanes)), scale, total[r]);
      }
    } else {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) total[r] = fma(load(from + r * kLanes), scale, total[r]);
    }
  };
  // The products of a group; those of an earlier one are added meanwhile.
  int64_t group = groups.begin, added = groups.begin;
  const auto step = [&]<int kSum>() {
    if (group >= groups.end) return;
    const int64_t end = std::min((group + 1) * weight.group_tiles, rows.k_tiles);
    tile_zero<kSum>();
    for (int64_t tile = group * weight.group_tiles; tile < end; ++tile) {
      const bf16* const values = expansion.next();
      tile_load<4>(rows.data + tile * rows.tile_stride, rows.row_stride);
      tile_load<5>(values, 64);
      tile_dot_bf16<kSum, 4, 5>();
    }
    if (group - added >= kLag) add(added++);
    tile_store<kSum>(fresh[kSum], 64);
    ++group;
  };
  while (group < groups.end) {
    step.template operator()<0>();
    step.template operator()<1>();
    step.template operator()<2>();
    step.template operator()<3>();
  }
  while (added < groups.end) add(added++);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) store(sums + r * kLanes, total[r]);
}

// The sums of at most 16 rows with blocks, from `sums` on, two tiles each.
template <class Format, int R, bool kZeros>
static void multiply_few_rows(const FewRows& rows, const Format& weight, Range blocks, float* sums, const char* after) {
  const int64_t panel = few_rows_panel(weight, rows.m);
  Expansion<Format> expansion(weight, blocks, rows.k_tiles, panel, after);
  for (int64_t first = 0; first < weight.groups; first += panel) {
    const Range groups{first, std::min(first + panel, weight.groups)};
    for (int64_t half = blocks.begin * 2; half < blocks.end * 2; ++half) {
      multiply_half<R, kZeros>(rows, weight, half, groups, sums + (half - blocks.begin * 2) * kTileRows * kLanes,
                               expansion);
    }
  }
}

template <class Format, bool kZeros>
static void multiply_few_rows(const FewRows& rows, const Format& weight, Range blocks, float* sums, const char* after) {
  if (rows.m > 8) return multiply_few_rows<Format, 16, kZeros>(rows, weight, blocks, sums, after);
  if (rows.m > 4) return multiply_few_rows<Format, 8, kZeros>(rows, weight, blocks, sums, after);
  if (rows.m > 2) return multiply_few_rows<Format, 4, kZeros>(rows, weight, blocks, sums, after);
  if (rows.m > 1) return multiply_few_rows<Format, 2, kZeros>(rows, weight, blocks, sums, after);
  multiply_few_rows<Format, 1, kZeros>(rows, weight, blocks, sums, after);
}

template <class Format>
static void multiply_few_rows(const FewRows& rows, const Format& weight, Range blocks, float* sums, const char* after) {
  if constexpr (Format::kMayHaveZeros) {
    if (weight.has_zeros()) return multiply_few_rows<Format, true>(rows, weight, blocks, sums, after);
  }
  multiply_few_rows<Format, false>(rows, weight, blocks, sums, after);
}

// Many rows: the inputs are cut in panels of whole groups, a block's panel of the weight is expanded once into the
// first level cache and used by all rows of a stripe, whose panel and sums over a band of blocks stay in the second.
struct GroupedBlocking {
  static constexpr int64_t kStripe = 24, kBand = 12;  // row tiles, blocks

  template <class Format>
  static int64_t panel(const Format& weight) {
    constexpr int64_t kTiles = 8;
    return std::max<int64_t>(1, kTiles / weight.group_tiles) * weight.group_tiles;
  }
};

struct GroupedMemory {
  float* sums;        // [band][pairs of row tiles][kPairSums]
  bf16* expanded;     // [panel][2 tiles]
  float* group_sums;  // [row tiles of a stripe][groups of a panel][16]

  static size_t bytes(int64_t panel) {
    constexpr int64_t kSums = GroupedBlocking::kStripe / 2 * GroupedBlocking::kBand * kPairSums;
    return kSums * sizeof(float) + panel * (kBlockStep + GroupedBlocking::kStripe * kTileRows * sizeof(float));
  }
  GroupedMemory(void* memory, int64_t panel) {
    sums = static_cast<float*>(memory);
    expanded = reinterpret_cast<bf16*>(sums + GroupedBlocking::kStripe / 2 * GroupedBlocking::kBand * kPairSums);
    group_sums = reinterpret_cast<float*>(expanded + panel * 2 * kTile);
  }
};

// One or two row tiles with a block, over a panel.
template <class Format, int kRowTiles, bool kZeros>
struct PairPanel {
  const char *rows0, *rows1;
  const bf16* expanded;
  const Format& weight;
  int64_t block, first_group, groups, tiles;
  const float* inputs0;  // sums of a row tile's inputs, by group
  const float* inputs1;
  float* sums;

  // The products of a group, summed in tiles 0 to 3.
  void multiply(int64_t group) const {
    tile_zero<0>();
    tile_zero<1>();
    if (kRowTiles == 2) tile_zero<2>();
    if (kRowTiles == 2) tile_zero<3>();
    const int64_t end = std::min((group + 1) * weight.group_tiles, tiles);
    for (int64_t t = group * weight.group_tiles; t < end; ++t) {
      tile_load<4>(rows0 + t * kTileBytes, 64);
      tile_load<6>(expanded + t * 2 * kTile, 64);
      tile_dot_bf16<0, 4, 6>();
      tile_load<7>(expanded + t * 2 * kTile + kTile, 64);
      tile_dot_bf16<1, 4, 7>();
      if (kRowTiles == 2) {
        tile_load<5>(rows1 + t * kTileBytes, 64);
        tile_dot_bf16<2, 5, 6>();
        tile_dot_bf16<3, 5, 7>();
      }
    }
  }

  static void store_tiles(float* to) {
    tile_store<0>(to, 64);
    tile_store<1>(to + 256, 64);
    if (kRowTiles == 2) tile_store<2>(to + 512, 64);
    if (kRowTiles == 2) tile_store<3>(to + 768, 64);
  }

  // Adds kCount groups' scaled sums.
  template <int kCount>
  void add(int64_t group, const float* fresh) const {
    const bool first = first_group + group == 0;
#pragma GCC unroll 4
    for (int t = 0; t < kRowTiles * 2; ++t) {
      Vec scale[kCount], less[kCount];
      for (int g = 0; g < kCount; ++g) {
        scale[g] = weight.scale(block * 2 + t % 2, first_group + group + g);
        if constexpr (kZeros) less[g] = weight.negative_zero(block * 2 + t % 2, first_group + group + g);
      }
      const float* const inputs = (t / 2 ? inputs1 : inputs0) + group * kTileRows;
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) {
        float* const to = sums + (t * kTileRows + r) * kLanes;
        Vec total = first ? zero() : load(to);
        for (int g = 0; g < kCount; ++g) {
          Vec products = load(fresh + g * kPairSums + (t * kTileRows + r) * kLanes);
          if constexpr (kZeros) products = fma(less[g], set(inputs[g * kTileRows + r]), products);
          total = fma(products, scale[g], total);
        }
        store(to, total);
      }
    }
  }

  // Groups two by two; they are added while the next two are multiplied.
  void run() const {
    alignas(64) float fresh[2][2][kPairSums];
    const auto slot = [&](int64_t group) { return fresh[group / 2 % 2][0]; };
    for (int64_t group = 0; group < groups; group += 2) {
      multiply(group);
      if (group > 0) add<2>(group - 2, slot(group - 2));
      store_tiles(slot(group));
      if (group + 1 < groups) {
        multiply(group + 1);
        store_tiles(slot(group) + kPairSums);
      }
    }
    const int64_t last = (groups - 1) / 2 * 2;
    groups % 2 ? add<1>(last, slot(last)) : add<2>(last, slot(last));
  }
};

// As multiply_band of gemm_amx.h; `rows` in panels of GroupedBlocking.
template <int kParts, bool kZeros, class Format, class Finish>
static void multiply_grouped_band(const PackedRows& rows, Range stripe, const Format& weight, Range band, int64_t m,
                                  const GroupedMemory& memory, const Finish& finish) {
  const int64_t pairs = blocks(stripe.end - stripe.begin, 2), panels = blocks(rows.k_tiles, rows.panel);
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t k_tiles = rows.panel_tiles(panel), groups = blocks(k_tiles, weight.group_tiles);
    const int64_t first_tile = panel * rows.panel, first_group = first_tile / weight.group_tiles;
    if constexpr (kZeros) {
      for (int64_t tile = stripe.begin; tile < stripe.end; ++tile) {
        for (int64_t group = 0; group < groups; ++group) {
          const int64_t first = group * weight.group_tiles, tiles = std::min(weight.group_tiles, k_tiles - first);
          for (int64_t r = 0; r < kTileRows; ++r) {
            memory.group_sums[((tile - stripe.begin) * groups + group) * kTileRows + r] =
                sum_of_inputs(rows.tiles(panel, tile) + first * kTileBytes + r * 64, kTileBytes, tiles);
          }
        }
      }
    }
    for (int64_t block = band.begin; block < band.end; ++block) {
      const int64_t next = block + 1 < band.end ? block + 1 : panel + 1 < panels ? band.begin : band.end - 1;
      const int64_t next_tile = block + 1 < band.end || panel + 1 == panels ? first_tile : first_tile + rows.panel;
      for (int64_t half = 0; half < 2; ++half) {
        const char* const from = weight.tile(block * 2 + half, first_tile);
        const char* const ahead = weight.tile(next * 2 + half, next_tile);
        for (int64_t t = 0; t < k_tiles; ++t) {
          for (int64_t i = 0; i < Format::kPackedTile; i += 64) prefetch_l2(ahead + t * Format::kPackedTile + i);
          Format::expand(from + t * Format::kPackedTile, memory.expanded + (t * 2 + half) * kTile);
        }
      }
      const auto sums_of = [&](int64_t b, int64_t pair) {
        return memory.sums + ((b - band.begin) * pairs + pair) * kPairSums;
      };
      const bool last = panel + 1 == panels && block % kParts == kParts - 1;
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t tile = stripe.begin + pair * 2;
        const char* const rows0 = rows.tiles(panel, tile);
        const float* const inputs0 = memory.group_sums + pair * 2 * groups * kTileRows;
        const Range range{tile * kTileRows, std::min({(tile + 2) * kTileRows, stripe.end * kTileRows, m})};
        if (tile + 1 < stripe.end) {
          PairPanel<Format, 2, kZeros>{
              rows0,   rows0 + k_tiles * kTileBytes, memory.expanded,     weight, block, first_group, groups, k_tiles,
              inputs0, inputs0 + groups * kTileRows, sums_of(block, pair)}
              .run();
        } else {
          PairPanel<Format, 1, kZeros>{
              rows0,   nullptr, memory.expanded,     weight, block, first_group, groups, k_tiles,
              inputs0, nullptr, sums_of(block, pair)}
              .run();
        }
        if (last) {
          const float* parts[kParts];
          for (int part = 0; part < kParts; ++part) parts[part] = sums_of(block - kParts + 1 + part, pair);
          finish.write(parts, range, block / kParts);
        }
      }
    }
  }
}

template <int kParts, class Format, class Finish>
static void multiply_grouped_band(const PackedRows& rows, Range stripe, const Format& weight, Range band, int64_t m,
                                  const GroupedMemory& memory, const Finish& finish) {
  if constexpr (Format::kMayHaveZeros) {
    if (weight.has_zeros()) return multiply_grouped_band<kParts, true>(rows, stripe, weight, band, m, memory, finish);
  }
  multiply_grouped_band<kParts, false>(rows, stripe, weight, band, m, memory, finish);
}

}  // namespace tilerank::TR_RUNG
