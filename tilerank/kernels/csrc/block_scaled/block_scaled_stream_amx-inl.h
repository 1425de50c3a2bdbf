// The AMX micro-kernel of at most 16 rows for block-scaled weights, which reads them once, in order (include after
// block_scaled_amx-inl.h).
//
// Two blocks are multiplied at a time: one tile of rows serves their four tiles, whose sums are independent. The tiles
// are expanded into the L1 cache quarter by quarter, three or four quarters before they are multiplied. Packed values
// are prefetched 2 KiB before they are expanded. The distances are tuned by measurement.
#pragma once

namespace tilerank::TR_RUNG {

// At most 16 rows in tiles of 32 inputs, padded with zeros.
struct FewRows {
  const char* data;
  int64_t row_stride, tile_stride;  // bytes
  int64_t m, k_tiles;
  float* k_block_sums;  // [K-blocks][16], if the weight has zeros

  // Bytes of the buffer `memory` of pack().
  static size_t bytes(int64_t m, int64_t k) { return static_cast<size_t>(blocks(k, kTileK) * m * 64); }

  // Packs rows tile by tile, so that few rows stay in the L1 cache; row(r) points to the k inputs of row r.
  template <class Row>
  static FewRows pack(const Row& row, int64_t m, int64_t k, char* memory, float* k_block_sums) {
    const FewRows to{memory, 64, m * 64, m, blocks(k, kTileK), k_block_sums};
    for (int64_t r = 0; r < m; ++r) {
      const bf16* const from = row(r);
      for (int64_t t = 0; t < to.k_tiles; ++t) {
        copy_line(memory + t * to.tile_stride + r * 64, from + t * kTileK, std::min(kTileK, k - t * kTileK));
      }
    }
    return to;
  }

  template <class Format>
  void add_up(const Format& weight) const {
    for (int64_t k_block = 0; k_block < weight.k_blocks; ++k_block) {
      const int64_t first = k_block * weight.k_block_tiles, tiles = std::min(weight.k_block_tiles, k_tiles - first);
      for (int64_t r = 0; r < m; ++r) {
        k_block_sums[k_block * kTileRows + r] =
            sum_of_inputs(data + r * row_stride + first * tile_stride, tile_stride, tiles);
      }
    }
  }
};

// The tile configuration of stream_block_scaled for m rows.
static inline TileConfig block_scaled_stream_tiles(int64_t m) { return tile_shapes(m, 5); }

// A position in the blocks of a weight, which are passed two at a time. The last of an odd number is paired with
// itself.
template <class Format>
struct PairCursor {
  static constexpr int64_t kStep = 2 * Format::kPackedTile;  // bytes

  const char *at, *after;
  int64_t block_bytes, k_tiles, blocks_left;
  int64_t second, left;  // bytes from the first block to the second; tiles left

  // after: where to continue when all blocks are passed; null: repeat the last two.
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

// Expands pairs of blocks tile by tile. Passed by value, so that it stays in registers.
template <class Format>
class ExpandedPairs {
 public:
  // Prefetches the first tiles. after: the block that is read when these are done, which is prefetched as well, or -1.
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

  // Expands a quarter of the current tile of both blocks: half of one of them. Calls must cycle through all four
  // quarters. The hardware prefetcher stays within a page and starts after a few accesses, so kNextPage lines of the
  // next page are prefetched half a page early.
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

// Calls prefetch(i), then write(sums, i) with the sums of blocks i and i + 1, two tiles of 16 rows each; if the number
// of blocks is odd, the last block appears twice. R: an upper bound of the number of rows.
template <int R, bool kZeros, class Format, class Prefetch, class Write>
static inline void stream_rows(const FewRows& rows, const Format& weight, Range blocks, ExpandedPairs<Format> expanded,
                               const Prefetch& prefetch, const Write& write) {
  // The ring buffer of expanded quarters, and how many of them are ready when one is multiplied. The sizes are tuned by
  // measurement.
  constexpr bool kInt4 = Format::kPackedTile < 512, kManyRows = R > 8;
  constexpr int kReady = kInt4 ? 3 : 4, kPlaces = kInt4 ? 4 : 8;
  // Lines prefetched from the next page; also tuned by measurement.
  constexpr int kNextPage = kInt4 ? 2 : kManyRows ? 4 : 0;
  alignas(4096) bf16 ring[kPlaces * kTile];
  alignas(
      64) float fresh[2][4][R * kLanes] = {};  // products of the last even K-block and of the last odd one, as tiles
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
    // Two K-blocks are added at a time if the rows' totals do not fit into registers.
    constexpr int kTogether = (R > 4) ? 2 : 1;
    const auto add = [&]<int kCount>(std::integral_constant<int, kCount>, int64_t k_block) {
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) {
        Vec scale[kCount], less[kCount];
        for (int g = 0; g < kCount; ++g) {
          scale[g] = weight.scale(both[t / 2], k_block + g, t % 2);
          if constexpr (kZeros) less[g] = weight.negative_zero(both[t / 2], k_block + g, t % 2);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          for (int g = 0; g < kCount; ++g) {
            Vec products = load(fresh[(k_block + g) % 2][t] + r * kLanes);
            if constexpr (kZeros)
              products = fma(less[g], set(rows.k_block_sums[(k_block + g) * kTileRows + r]), products);
            total[t][r] = fma(products, scale[g], total[t][r]);
          }
        }
      }
    };
    int64_t tile = 0;
    const char* inputs = rows.data;
    const auto fetch_rows = [&](int64_t half) {
      // Many rows are read from the L2 cache. With int4 they are prefetched one tile ahead. With fp8 the products leave
      // time to wait, and prefetching rows would delay the weight.
      if constexpr (kInt4 && kManyRows) {
        for (int64_t line = half * 8; line < half * 8 + 8; ++line) {
          _mm_prefetch(inputs + rows.tile_stride + line * 64, _MM_HINT_T0);
        }
      }
    };
    for (int64_t k_block = 0; k_block < weight.k_blocks; ++k_block) {
      const int64_t end = std::min(tile + weight.k_block_tiles, rows.k_tiles);
      tile_zero<0>();
      tile_zero<1>();
      tile_zero<2>();
      tile_zero<3>();
      for (; tile < end; ++tile, inputs += rows.tile_stride) {
        expanded.template expand<kReady % 4, kNextPage>(next(to));
        if constexpr (kManyRows) {  // a non-temporal hint: many rows would evict reused lines from L1
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
      for (int64_t next = block + 2; next < std::min(block + 4, blocks.end); ++next) weight.fetch_scales(next, k_block);
      if (k_block > 0 && k_block % kTogether == 0) add(std::integral_constant<int, kTogether>(), k_block - kTogether);
      float (&sums_of)[4][R * kLanes] = fresh[k_block % 2];
      tile_store<0>(sums_of[0], 64);
      tile_store<1>(sums_of[1], 64);
      tile_store<2>(sums_of[2], 64);
      tile_store<3>(sums_of[3], 64);
    }
    if (kTogether == 1 || weight.k_blocks % kTogether) {
      add(std::integral_constant<int, 1>(), weight.k_blocks - 1);
    } else {
      add(std::integral_constant<int, kTogether>(), weight.k_blocks - kTogether);
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

// Multiplies the rows with `blocks`, kParts of which form a result; finish.write(parts, rows, result) as in
// multiply_stripe.
template <int kParts, class Format, class Finish>
static void stream_block_scaled(const FewRows& rows, const Format& weight, Range blocks, ExpandedPairs<Format> expanded,
                                const Finish& finish) {
  const auto prefetch = [&](int64_t block) {
    for (int64_t part = 0; part < 2; part += kParts) finish.prefetch({0, rows.m}, (block + part) / kParts);
  };
  // Not inlined, because loops for several numbers of rows call it.
  const auto write = [&] [[gnu::noinline]] (const auto& sums, int64_t block) {
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
