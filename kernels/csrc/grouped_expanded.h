// Many rows with weights of a few bits where values are not multiplied as pairs, for grouped_rows.h (no include guard,
// no namespace of its own): a piece of a group is expanded once, to floats in the first-level cache, for all panels.

constexpr int64_t kPartTiles = kPart / kUnitsOfTile;

// to[32 inputs][32 outputs]
template <class Format>
static void expand_tile(const char* tile, int64_t ahead, float* to) {
  for_pairs<Format>(tile, ahead, [&](int64_t unit, const auto& pairs) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      store(to + unit * kBlockN + v * kLanes, pairs[v].a);
      store(to + (unit + 1) * kBlockN + v * kLanes, pairs[v].b);
    }
  });
}

// totals[R][32] += a piece of a group with R rows, or partial[R][32] where the group goes on.
template <int R, class Format>
[[gnu::noinline]] static void multiply_piece(const Unit<bf16>* x, const float* weight, int64_t units, bool begins,
                                             bool ends, float* partial, const GroupScale<Format>& scale,
                                             const float* input_sums, float* totals) {
  Vec sums[R][kVecs];
  load_sums<R>(begins ? nullptr : partial, sums);
  add_units<R>(x, weight, units, NothingAhead{}, sums);
  ends ? scale.add(sums, input_sums, totals) : store_sums<R>(partial, sums);
}

// totals[row][32] += a group of a block with `chosen` panels. After it, weights are read from `next` on.
template <class Format>
static void multiply_group(const GroupedRows& rows, Range chosen, const Format& weight, int64_t block, int64_t group,
                           int64_t k, const char* next, GroupedWork& work, float* totals) {
  const RowPanels<bf16>& panels = rows.panels;
  const int64_t first = group * weight.group_tiles;
  const int64_t last = std::min(first + weight.group_tiles, blocks(k, kBlockK));
  const GroupScale scale(weight, block, group);
  for (int64_t tile = first, end; tile < last; tile = end) {
    end = std::min({last, tile + kPieceTiles, (tile / kPartTiles + 1) * kPartTiles});
    // What is read next comes from memory while this is multiplied.
    const int64_t ahead = (end < last ? weight.tile(block, end) : next) - weight.tile(block, tile);
    for (int64_t i = tile; i < end; ++i) {
      expand_tile<Format>(weight.tile(block, i), ahead, work.tiles + (i - tile) * 2 * kTile);
    }
    const int64_t units = (end - tile) * kUnitsOfTile;
    for (int64_t panel = chosen.begin; panel < chosen.end; ++panel) {
      const int64_t row = panels.first_row(panel), to = (row - panels.first_row(chosen.begin)) * kBlockN;
      for_rows<Format::kMostRows>(panels.rows(panel), [&](auto r) {
        multiply_piece<r>(panels.at(panel, tile * kUnitsOfTile), work.tiles, units, tile == first, end == last,
                          work.partial + to, scale, rows.input_sums + group * panels.m + row, totals + to);
      });
    }
  }
}

// As multiply_band_of_codes.
template <class Format>
static void multiply_band_expanded(const GroupedRows& rows, Range chosen, const Format& weight, Range band, int64_t k,
                                   GroupedWork& work) {
  const int64_t count = rows.panels.first_row(chosen.end) - rows.panels.first_row(chosen.begin);
  std::fill_n(work.totals, (band.end - band.begin) * count * kBlockN, 0.0f);
  const int64_t step = std::max<int64_t>(1, kBandInputs / (weight.group_tiles * kBlockK));
  for (int64_t first = 0, last; first < weight.groups; first = last) {
    last = std::min(first + step, weight.groups);
    const auto group_at = [&](int64_t block, int64_t group) { return weight.tile(block, group * weight.group_tiles); };
    for (int64_t block = band.begin; block < band.end; ++block) {
      const char* const after = block + 1 < band.end ? group_at(block + 1, first) : group_at(band.begin, last);
      for (int64_t group = first; group < last; ++group) {
        multiply_group(rows, chosen, weight, block, group, k, group + 1 < last ? group_at(block, group + 1) : after,
                       work, work.totals + (block - band.begin) * count * kBlockN);
      }
    }
  }
}
