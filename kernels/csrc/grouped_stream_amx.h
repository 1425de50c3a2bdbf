// Products of at most 16 rows with the weights of grouped.h in AMX tiles, which are read once (include after
// grouped_amx.h).
//
// Two blocks at a time: a tile of rows serves their four tiles, whose sums do not wait for each other. A tile of both
// is expanded into the first-level cache quarter by quarter, three quarters before it is multiplied; what is packed
// comes there from memory 2 KiB before. Expanded 2 tiles before, or one block at a time, it took a fifth longer, one or
// two quarters before a tenth.
#pragma once

namespace tilerank::TR_RUNG {

// At most 16 rows in tiles of 32 inputs, padded with zeros.
struct FewRows {
  const char* data;
  int64_t row_stride, tile_stride;  // bytes
  int64_t m, k_tiles;
  float* group_sums;  // [groups][16], where the weight has zeros

  // Bytes that pack() wants.
  static size_t bytes(int64_t m, int64_t k) { return static_cast<size_t>(blocks(k, kBlockK) * m * 64); }

  // row(r): where the k inputs of row r are. Packed tile by tile, so that few rows stay in the first-level cache.
  template <class Row>
  static FewRows pack(const Row& row, int64_t m, int64_t k, char* memory, float* group_sums) {
    const FewRows to{memory, 64, m * 64, m, blocks(k, kBlockK), group_sums};
    for (int64_t r = 0; r < m; ++r) {
      const bf16* const from = row(r);
      for (int64_t t = 0; t < to.k_tiles; ++t) {
        const __mmask32 mask = static_cast<__mmask32>((uint64_t{1} << std::min(kBlockK, k - t * kBlockK)) - 1);
        _mm512_store_si512(memory + t * to.tile_stride + r * 64, _mm512_maskz_loadu_epi16(mask, from + t * kBlockK));
      }
    }
    return to;
  }

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

// The tiles that stream_grouped uses, for m rows.
static inline TileConfig grouped_stream_tiles(int64_t m) {
  TileConfig config;
  for (int tile = 0; tile < 5; ++tile) config.set(tile, static_cast<int>(m), 64);
  for (int tile = 5; tile < 7; ++tile) config.set(tile, kTileRows, 64);
  return config;
}

// A tile in blocks of a weight, which are passed two by two, of an odd number the last twice.
template <class Format>
struct PairCursor {
  static constexpr int64_t kStep = 2 * Format::kPackedTile;  // bytes

  const char *at, *after;
  int64_t block_bytes, k_tiles, blocks_left;
  int64_t second, left;  // bytes from the first block to the second; tiles

  // after: what comes when all are passed; if none, the last two again.
  PairCursor(const Format& weight, Range blocks, int64_t k_tiles, const char* after)
      : at(weight.tile(blocks.begin, 0)),
        after(after),
        block_bytes(weight.tile(1, 0) - weight.tile(0, 0)),
        k_tiles(k_tiles),
        blocks_left(blocks.end - blocks.begin) {
    begin();
  }

  [[gnu::always_inline]] const char* block(int i) const { return at + (i ? second : 0); }

  [[gnu::always_inline]] void advance() {
    at += kStep;
    if (--left == 0) {
      at -= k_tiles * kStep;
      if (blocks_left > 2) {
        at += 2 * block_bytes;
        blocks_left -= 2;
      } else if (after) {
        at = after;
      }
      begin();
    }
  }

 private:
  [[gnu::always_inline]] void begin() {
    second = blocks_left > 1 ? block_bytes : 0;
    left = k_tiles;
  }
};

// Pairs of blocks of a weight, expanded tile by tile. A value that is copied, so that it stays in registers.
template <class Format>
class ExpandedPairs {
 public:
  // Fetches the first of them. after: the block whose turn comes when all are read, to be fetched as well, or none.
  ExpandedPairs(const Format& weight, Range blocks, int64_t k_tiles, int64_t after = -1)
      : now_(weight, blocks, k_tiles, nullptr),
        ahead_(weight, blocks, k_tiles, after < 0 ? nullptr : weight.tile(after, 0)) {
    for (int64_t tile = 0; tile < kAhead; ++tile, ahead_.advance()) {
      for (int block = 0; block < 2; ++block) {
        for (int64_t line = 0; line < 2 * Format::kPackedTile; line += 64) {
          _mm_prefetch(ahead_.block(block) + line, _MM_HINT_T0);
        }
      }
    }
  }

  // A quarter of the next tile of both blocks: the halves of each. All four take turns. The processor reads ahead
  // inside a page, once some lines of it were asked for: kNextPage of the next page's are, half a page early.
  template <int kQuarter, int kNextPage>
  [[gnu::always_inline]] void expand(bf16* to) {
    constexpr int64_t kHalf = kQuarter % 2 * Format::kPackedTile;
    const char* const ahead = ahead_.block(kQuarter / 2);
    if constexpr (kHalf == 0 && kNextPage > 0) {
      if ((reinterpret_cast<uintptr_t>(ahead) & (kPage - 1)) == kPage / 2) {
        for (int line = 0; line < kNextPage; ++line) _mm_prefetch(ahead + kPage / 2 + line * 64, _MM_HINT_T1);
      }
    }
    Format::expand(now_.block(kQuarter / 2) + kHalf, to, ahead + kHalf);
    if constexpr (kQuarter == 3) {
      now_.advance();
      ahead_.advance();
    }
  }

 private:
  using Cursor = PairCursor<Format>;
  static constexpr int64_t kAhead = 2048 / Cursor::kStep;  // tiles
  static constexpr int64_t kPage = 4096;

  Cursor now_, ahead_;
};

// write(sums, i) gets the sums of blocks i and i + 1, two tiles of 16 rows each; of the last of an odd number twice.
// prefetch(i) comes before. R: rows, or more.
template <int R, bool kZeros, class Format, class Prefetch, class Write>
static inline void stream_rows(const FewRows& rows, const Format& weight, Range blocks, ExpandedPairs<Format> expanded,
                               const Prefetch& prefetch, const Write& write) {
  // Expanded quarters, in turn; so many are ready when one is multiplied. Measured: places that come back soon, all
  // different in the low bits of their addresses, are best for int4, twice as many for fp8.
  constexpr bool kInt4 = Format::kPackedTile < 512, kManyRows = R > 8;
  constexpr int kReady = kInt4 ? 3 : 4, kPlaces = kInt4 ? 4 : 8;
  // Measured, too: more lines of fp8, whose pages are passed faster, and none where few rows make it faster yet.
  constexpr int kNextPage = kInt4 ? 2 : kManyRows ? 4 : 0;
  alignas(4096) bf16 ring[kPlaces * kTile];
  alignas(64) float fresh[2][4][R * kLanes] = {};  // of the last even group and of the last odd one, in tiles
  alignas(64) float sums[2][2 * kTileRows * kLanes];
  bf16 *to = ring, *from = ring;
  const auto next = [&](bf16*& place) {
    bf16* const was = place;
    place = was == ring + (kPlaces - 1) * kTile ? ring : was + kTile;
    return was;
  };
  expanded.template expand<0, kNextPage>(next(to));
  expanded.template expand<1, kNextPage>(next(to));
  expanded.template expand<2, kNextPage>(next(to));
  if constexpr (kReady == 4) expanded.template expand<3, kNextPage>(next(to));
  for (int64_t block = blocks.begin; block < blocks.end; block += 2) {
    prefetch(block);
    const int64_t both[2] = {block, std::min(block + 1, blocks.end - 1)};
    Vec total[4][R];
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) std::fill_n(total[t], R, zero());
    // Two groups at a time where the rows' totals do not fit the registers.
    constexpr int kTogether = (R > 4) ? 2 : 1;
    const auto add = [&]<int kCount>(std::integral_constant<int, kCount>, int64_t group) {
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) {
        Vec scale[kCount], less[kCount];
        for (int g = 0; g < kCount; ++g) {
          scale[g] = weight.scale(both[t / 2], group + g, t % 2);
          if constexpr (kZeros) less[g] = weight.negative_zero(both[t / 2], group + g, t % 2);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          for (int g = 0; g < kCount; ++g) {
            Vec products = load(fresh[(group + g) % 2][t] + r * kLanes);
            if constexpr (kZeros) products = fma(less[g], set(rows.group_sums[(group + g) * kTileRows + r]), products);
            total[t][r] = fma(products, scale[g], total[t][r]);
          }
        }
      }
    };
    int64_t tile = 0;
    const char* inputs = rows.data;
    const auto fetch_rows = [&](int64_t half) {
      // Many rows come from the second-level cache. Those of int4 are asked for a tile before their products would
      // wait; fp8 has time to wait, and requests of rows delay those of the weight.
      if constexpr (kInt4 && kManyRows) {
        for (int64_t line = half * 8; line < half * 8 + 8; ++line) {
          _mm_prefetch(inputs + rows.tile_stride + line * 64, _MM_HINT_T0);
        }
      }
    };
    for (int64_t group = 0; group < weight.groups; ++group) {
      const int64_t end = std::min(tile + weight.group_tiles, rows.k_tiles);
      tile_zero<0>();
      tile_zero<1>();
      tile_zero<2>();
      tile_zero<3>();
      for (; tile < end; ++tile, inputs += rows.tile_stride) {
        expanded.template expand<kReady % 4, kNextPage>(next(to));
        if constexpr (kManyRows) {  // so many as that would push out of the first level what is used again
          tile_load_stream<4>(inputs, rows.row_stride);
        } else {
          tile_load<4>(inputs, rows.row_stride);
        }
        tile_load<5>(next(from), 64);
        tile_dot_bf16<0, 4, 5>();
        expanded.template expand<(kReady + 1) % 4, kNextPage>(next(to));
        fetch_rows(0);
        tile_load<6>(next(from), 64);
        tile_dot_bf16<1, 4, 6>();
        expanded.template expand<(kReady + 2) % 4, kNextPage>(next(to));
        tile_load<5>(next(from), 64);
        tile_dot_bf16<2, 4, 5>();
        expanded.template expand<(kReady + 3) % 4, kNextPage>(next(to));
        fetch_rows(1);
        tile_load<6>(next(from), 64);
        tile_dot_bf16<3, 4, 6>();
      }
      for (int64_t next = block + 2; next < std::min(block + 4, blocks.end); ++next) weight.fetch_scales(next, group);
      if (group > 0 && group % kTogether == 0) add(std::integral_constant<int, kTogether>(), group - kTogether);
      float (&sums_of)[4][R * kLanes] = fresh[group % 2];
      tile_store<0>(sums_of[0], 64);
      tile_store<1>(sums_of[1], 64);
      tile_store<2>(sums_of[2], 64);
      tile_store<3>(sums_of[3], 64);
    }
    if (kTogether == 1 || weight.groups % kTogether) {
      add(std::integral_constant<int, 1>(), weight.groups - 1);
    } else {
      add(std::integral_constant<int, kTogether>(), weight.groups - kTogether);
    }
    for (int t = 0; t < 4; ++t) {
      for (int r = 0; r < R; ++r) store(sums[t / 2] + (t % 2 * kTileRows + r) * kLanes, total[t][r]);
    }
    write(sums, block);
  }
}

template <bool kZeros, class Format, class Prefetch, class Write>
static void stream_rows(const FewRows& rows, const Format& weight, Range blocks, ExpandedPairs<Format> expanded,
                        const Prefetch& prefetch, const Write& write) {
  if (rows.m > 8) return stream_rows<16, kZeros>(rows, weight, blocks, expanded, prefetch, write);
  if (rows.m > 4) return stream_rows<8, kZeros>(rows, weight, blocks, expanded, prefetch, write);
  if (rows.m > 2) return stream_rows<4, kZeros>(rows, weight, blocks, expanded, prefetch, write);
  if (rows.m > 1) return stream_rows<2, kZeros>(rows, weight, blocks, expanded, prefetch, write);
  stream_rows<1, kZeros>(rows, weight, blocks, expanded, prefetch, write);
}

// Results of some blocks, each of which takes kParts, to finish.write(parts, rows, result).
template <int kParts, class Format, class Finish>
static void stream_grouped(const FewRows& rows, const Format& weight, Range blocks, ExpandedPairs<Format> expanded,
                           const Finish& finish) {
  const auto prefetch = [&](int64_t block) {
    for (int64_t part = 0; part < 2; part += kParts) finish.prefetch({0, rows.m}, (block + part) / kParts);
  };
  const auto write = [&](const auto& sums, int64_t block) {
    if constexpr (kParts == 2) {
      finish.write({sums[0], sums[1]}, {0, rows.m}, block / 2);
    } else {
      finish.write({sums[0]}, {0, rows.m}, block);
      if (block + 1 < blocks.end) finish.write({sums[1]}, {0, rows.m}, block + 1);
    }
  };
  if constexpr (Format::kMayHaveZeros) {
    if (weight.has_zeros()) {
      rows.add_up(weight);
      return stream_rows<true>(rows, weight, blocks, expanded, prefetch, write);
    }
  }
  stream_rows<false>(rows, weight, blocks, expanded, prefetch, write);
}

}  // namespace tilerank::TR_RUNG
