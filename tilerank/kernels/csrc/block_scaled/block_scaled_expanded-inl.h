// Products of many rows on rungs without products of bf16 pairs (included by block_scaled_rows-inl.h, inside its
// namespace): a piece of a K-block is expanded once, in the L1 cache, for all panels, as a packed weight (pack.h) of
// fp32, or of bf16 where that takes fewer instructions.

template <class Format>
constexpr int64_t kPartTiles = kPartUnits / kUnitsOfTile<Format>;

template <class Format>
using Expanded = std::conditional_t<ExpandsToBf16<typename Format::Line>, bf16, float>;

template <class Format>
static void expand_tile(const char* tile, int64_t ahead, float* to) {
  for_pairs<kPanelRows, Format>(tile, ahead, [&](int64_t unit, const auto& pairs) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      store(to + unit * kBlockN + v * kLanes, pairs[v].a);
      store(to + (unit + 1) * kBlockN + v * kLanes, pairs[v].b);
    }
  });
}

#ifdef TR_AVX2
template <class Format>
static void expand_tile(const char* tile, int64_t ahead, bf16* to) {
  using Line = typename Format::Line;
  for (const char* const end = tile + 2 * Format::kPackedTile; tile != end; tile += 64) {
    _mm_prefetch(tile + ahead, _MM_HINT_T0);
#pragma GCC unroll 2
    for (int v = 0; v < kHalfN / kLanes; ++v) {
      const Line line(tile + v * kLanes * 4);
      [&]<int... P>(std::integer_sequence<int, P...>) {
        (_mm256_store_si256(reinterpret_cast<Ints*>(to + (P * kHalfN + v * kLanes) * 2), line.template bf16_pairs<P>()),
         ...);
      }(std::make_integer_sequence<int, Line::kInputs / 2>{});
    }
    to += Line::kInputs * kHalfN;
  }
}
#endif

// totals[R][32] += R rows x a piece that ends a K-block; other pieces add to partial[R][32].
template <int R, class Format>
[[gnu::noinline]] static void multiply_piece(const Unit<bf16>* x, const Expanded<Format>* weight, int64_t units,
                                             bool begins, bool ends, float* partial, const KBlockScale<Format>& scale,
                                             const float* input_sums, float* totals) {
  constexpr int V = Format::kMostRows > kWholeBlockRows ? kVecs / 2 : kVecs;  // vectors whose sums fill the registers
  const auto multiply = [&]<int kFirst>() __attribute__((always_inline)) {
    Vec sums[R][V];
    NoPrefetch none;
    load_sums(begins ? nullptr : partial + kFirst * kLanes, sums);
    for (int64_t unit = 0; unit < units; unit += Format::kTileInputs) {
      add_units<R, kFirst>(x + unit * R, weight + unit * kBlockN, Format::kTileInputs, none, sums);
    }
    ends ? scale.template add<kFirst>(sums, input_sums, totals) : store_sums(partial + kFirst * kLanes, sums);
  };
  multiply.template operator()<0>();
  if constexpr (V < kVecs) multiply.template operator()<V>();
}

// totals[row][32] += the panels `chosen` x one K-block of a block. `next`: the weights to read after it.
template <class Format>
static void multiply_k_block(const BlockScaledRows& rows, Range chosen, const Format& weight, int64_t block,
                             int64_t k_block, int64_t k, const char* next, BlockScaledScratch& work, float* totals) {
  const RowPanels<bf16>& panels = rows.panels;
  const int64_t first = k_block * weight.k_block_tiles;
  const int64_t last = std::min(first + weight.k_block_tiles, blocks(k, Format::kTileInputs));
  const KBlockScale scale(weight, block, k_block);
  for (int64_t tile = first, end; tile < last; tile = end) {
    end = std::min({last, tile + kPieceTiles, (tile / kPartTiles<Format> + 1) * kPartTiles<Format>});
    // The next piece is prefetched meanwhile.
    const int64_t ahead = (end < last ? weight.tile(block, end) : next) - weight.tile(block, tile);
    auto* const tiles = reinterpret_cast<Expanded<Format>*>(work.tiles);
    for (int64_t i = tile; i < end; ++i) {
      expand_tile<Format>(weight.tile(block, i), ahead, tiles + (i - tile) * Format::kTileInputs * kBlockN);
    }
    const int64_t units = (end - tile) * kUnitsOfTile<Format>;
    for (int64_t panel = chosen.begin; panel < chosen.end; ++panel) {
      const int64_t row = panels.first_row(panel), to = (row - panels.first_row(chosen.begin)) * kBlockN;
      for_rows<Format::kMostRows>(panels.rows(panel), [&](auto r) {
        multiply_piece<r>(panels.at(panel, tile * kUnitsOfTile<Format>), tiles, units, tile == first, end == last,
                          work.partial + to, scale, rows.input_sums + k_block * panels.m + row, totals + to);
      });
    }
  }
}

// multiply_band_of_codes with expanded pieces.
template <class Format>
static void multiply_band_expanded(const BlockScaledRows& rows, Range chosen, const Format& weight, Range band,
                                   int64_t k, BlockScaledScratch& work) {
  const int64_t count = rows.panels.first_row(chosen.end) - rows.panels.first_row(chosen.begin);
  std::fill_n(work.totals, (band.end - band.begin) * count * kBlockN, 0.0f);
  const int64_t step = std::max<int64_t>(1, kBandInputs / (weight.k_block_tiles * Format::kTileInputs));
  for (int64_t first = 0, last; first < weight.k_blocks; first = last) {
    last = std::min(first + step, weight.k_blocks);
    const auto k_block_at = [&](int64_t block, int64_t k_block) {
      return weight.tile(block, k_block * weight.k_block_tiles);
    };
    for (int64_t block = band.begin; block < band.end; ++block) {
      const char* const after = block + 1 < band.end ? k_block_at(block + 1, first) : k_block_at(band.begin, last);
      for (int64_t k_block = first; k_block < last; ++k_block) {
        multiply_k_block(rows, chosen, weight, block, k_block, k,
                         k_block + 1 < last ? k_block_at(block, k_block + 1) : after, work,
                         work.totals + (block - band.begin) * count * kBlockN);
      }
    }
  }
}
