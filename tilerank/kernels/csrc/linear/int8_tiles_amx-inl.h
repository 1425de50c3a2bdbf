// Products of rows that are quantised to int8 in steps with packed weights in AMX tiles (include after
// gemm_amx-inl.h and int8_stripes-inl.h). A step of a form is one K-tile. Its sums are scaled and added as in vectors,
// so that both give the same bits.
#pragma once

namespace tilerank::TR_RUNG {

// How the totals of a block become values.
template <class Form>
struct TotalScaling {
  const typename Form::Weight& weight;

  Vec32 values(const float* totals, int64_t step, int64_t, int64_t block) const {
    const typename Form::Block of(weight, block);
    return {of.value(0, load(totals), 0.0f), of.value(1, load(totals + step), 0.0f)};
  }
};

// Quantised rows in tiles, and for every row tile and step the 16 int32 from which sums start and the 16 scales of its
// rows. k is split into panels: that of a block, expanded if the form needs it, stays in the L1 cache while all rows of
// a stripe are multiplied with it; the stripe's panel and its totals with a band of blocks stay in L2.
template <class Form>
struct Int8Tiles {
  using Weight = typename Form::Weight;
  using Block = typename Form::Block;
  static constexpr int64_t kStripe = 32, kBand = 12;  // row tiles, blocks
  static constexpr int64_t kPanel = 8;                // tiles of 64 inputs
  static constexpr int64_t kStepsOfTile = 64 / Form::kInputs;
  static constexpr int64_t kFactors = 2 * kTileRows;                   // of a row tile and a step
  static constexpr int64_t kHalfTile = Form::kInputs * (kBlockN / 2);  // bytes of the codes of 16 outputs
  // A thread's memory: totals[block][pair of row tiles], then an expanded panel.
  static constexpr size_t kWorking = kStripe / 2 * kBand * kPairSums * sizeof(float) + kPanel * kBlockStep;

  PackedRows packed;
  char* factors;  // [row tiles][steps][kFactors]
  int64_t steps;

  // memory: bytes(m, k)
  Int8Tiles(char* memory, int64_t m, int64_t k)
      : packed{memory, blocks(m, kTileRows), blocks(k, 64), kPanel},
        factors(memory + packed.row_tiles * packed.k_tiles * kTileBytes),
        steps(blocks(k, Form::kInputs)) {}
  static size_t bytes(int64_t m, int64_t k) {
    return static_cast<size_t>(blocks(m, kTileRows) * blocks(k, 64)) * (kTileBytes + kStepsOfTile * kFactors * 4);
  }

  static TileConfig shapes() {
    TileConfig config = panel_tiles(kTileRows);
    for (int tile = 4; tile < 6; ++tile) config.set(tile, kTileRows, Form::kInputs);
    for (int tile = 6; tile < 8; ++tile) config.set(tile, Form::kInputs / 4, 64);
    return config;
  }

  // Quantises row `row`.
  template <class T>
  void put(const T* from, int64_t k, int64_t row) const {
    const int64_t tile = row / kTileRows, r = row % kTileRows;
    for (int64_t step = 0; step < steps; ++step) {
      const T* const some = from + step * Form::kInputs;
      const int64_t inputs = std::min(Form::kInputs, k - step * Form::kInputs), t = step / kStepsOfTile;
      const Quantiser quantiser(largest_bits(some, inputs));
      alignas(64) int8_t codes[64];
      store_codes(codes, some, inputs, quantiser);
      store(codes, Form::in_order(load_ints(codes)));
      char* const row_tile = packed.tiles(t / kPanel, tile) + t % kPanel * kTileBytes;
      std::memcpy(row_tile + r * 64 + step % kStepsOfTile * Form::kInputs, codes, Form::kInputs);
      char* const own = factors + (tile * steps + step) * kFactors * 4;
      const int32_t start = stored_start<Form>(start_of(codes, Form::kZero), quantiser.scale);
      std::memcpy(own + r * 4, &start, 4);
      std::memcpy(own + (kTileRows + r) * 4, &quantiser.scale, 4);
    }
  }

  // Multiplies row tiles with the blocks of `results`, kParts blocks each; finish as in multiply_stripe. working:
  // kWorking bytes.
  template <int kParts, class Finish>
  void multiply(Range stripe, int64_t m, const Weight& w, Range results, char* working, const Finish& finish) const {
    constexpr int64_t kResults = kBand / kParts;
    const int64_t pairs = blocks(stripe.end - stripe.begin, 2);
    float* const totals = reinterpret_cast<float*>(working);
    for (int64_t result = results.begin; result < results.end; result += kResults) {
      const Range band{result, std::min(result + kResults, results.end)};
      multiply_band(stripe, w, {band.begin * kParts, band.end * kParts}, totals);
      for (int64_t i = band.begin; i < band.end; ++i) {
        for (int64_t pair = 0; pair < pairs; ++pair) {
          const float* parts[kParts];
          for (int part = 0; part < kParts; ++part) {
            parts[part] = totals + (((i - band.begin) * kParts + part) * pairs + pair) * kPairSums;
          }
          const int64_t first = stripe.begin + pair * 2;
          const Range rows{first * kTileRows, std::min({(first + 2) * kTileRows, stripe.end * kTileRows, m})};
          if constexpr (kParts == 2) {
            finish.write({parts[0], parts[1]}, rows, i);
          } else {
            finish.write({parts[0]}, rows, i);
          }
        }
      }
    }
  }

 private:
  // totals[block][pair] = the row tiles of the stripe x the blocks of the band.
  void multiply_band(Range stripe, const Weight& w, Range band, float* totals) const {
    const int64_t pairs = blocks(stripe.end - stripe.begin, 2), panels = blocks(packed.k_tiles, kPanel);
    std::fill_n(totals, (band.end - band.begin) * pairs * kPairSums, 0.0f);
    char* const expanded = reinterpret_cast<char*>(totals + kStripe / 2 * kBand * kPairSums);
    const auto panel_of = [&](const Block& block, int64_t panel) {
      return block.codes + panel * kPanel * kStepsOfTile * Form::kStoredBytes;
    };
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t first = panel * kPanel * kStepsOfTile, count = std::min(kPanel * kStepsOfTile, steps - first);
      const int64_t share = blocks(count * Form::kStoredBytes / 64, pairs) * 64;
      for (int64_t i = band.begin; i < band.end; ++i) {
        const Block block(w, i);
        const bool turns = i + 1 == band.end;
        const char* const next = panel_of(turns ? Block(w, band.begin) : Block(w, i + 1), panel + (turns ? 1 : 0));
        const char* const codes = Form::tiles(panel_of(block, panel), count, expanded);
        for (int64_t pair = 0; pair < pairs; ++pair) {
          for (int64_t line = 0; line < share; line += 64) prefetch_l2(next + pair * share + line);
          const int64_t tile = stripe.begin + pair * 2;
          float* const to = totals + ((i - band.begin) * pairs + pair) * kPairSums;
          if (tile + 1 < stripe.end) {
            multiply_panel<2>(tile, panel, block, codes, first, count, to);
          } else {
            multiply_panel<1>(tile, panel, block, codes, first, count, to);
          }
        }
      }
    }
  }

  // totals += one or two row tiles x `count` steps of a block. The sums of a step remain in the tiles; the next step
  // stores each of them just before it reuses its tile. They are scaled and added while the next products run.
  template <int kRowTiles>
  void multiply_panel(int64_t row_tile, int64_t panel, const Block& block, const char* codes, int64_t first,
                      int64_t count, float* totals) const {
    alignas(64) float sums[2 * kRowTiles][kTileRows * kLanes];
    const char* const rows0 = packed.tiles(panel, row_tile);
    const char* const rows1 = rows0 + packed.panel_tiles(panel) * kTileBytes;
    const auto add_step = [&](int64_t step) {
      const auto by = block.step(first + step, 0);
      for (int tile = 0; tile < 2 * kRowTiles; ++tile) {
        const char* const starts = factors + ((row_tile + tile / 2) * steps + first + step) * kFactors * 4;
        float* const to = totals + tile * kTileRows * kLanes;
#pragma GCC unroll 16
        for (int r = 0; r < kTileRows; ++r) {
          Ints exact = load_ints(sums[tile] + r * kLanes);
          if constexpr (Form::kStarts) exact = add(exact, load_word(starts + r * 4));
          const Vec scale = set(load_float(starts + (kTileRows + r) * 4));
          store(to + r * kLanes, by.add(tile % 2, exact, starts + r * 4, scale, load(to + r * kLanes)));
        }
      }
    };
    for (int64_t step = 0; step < count; ++step, codes += 2 * kHalfTile) {
      const auto start = [&]<int T>(std::integral_constant<int, T>) {
        if (step > 0) tile_store<T>(sums[T], 64);
        tile_zero<T>();
      };
      const int64_t at = step / kStepsOfTile * kTileBytes + step % kStepsOfTile * Form::kInputs;
      tile_load_stream<4>(rows0 + at, 64);
      tile_load<6>(codes, 64);
      start(std::integral_constant<int, 0>());
      tile_dot_int8<0, 4, 6>();
      tile_load<7>(codes + kHalfTile, 64);
      start(std::integral_constant<int, 1>());
      tile_dot_int8<1, 4, 7>();
      if constexpr (kRowTiles == 2) {
        tile_load_stream<5>(rows1 + at, 64);
        start(std::integral_constant<int, 2>());
        tile_dot_int8<2, 5, 6>();
        start(std::integral_constant<int, 3>());
        tile_dot_int8<3, 5, 7>();
      }
      if (step > 0) add_step(step - 1);
    }
    tile_store<0>(sums[0], 64);
    tile_store<1>(sums[1], 64);
    if constexpr (kRowTiles == 2) tile_store<2>(sums[2], 64);
    if constexpr (kRowTiles == 2) tile_store<3>(sums[3], 64);
    add_step(count - 1);
  }
};

}  // namespace tilerank::TR_RUNG
