// Products of rows that are quantised with one scale each with an int8 weight in AMX tiles (no include guard).

namespace tilerank::TR_RUNG {

// Prefetches the first two blocks of a weight in small portions, while rows are quantised.
struct FirstBlocks {
  const char* at;
  int64_t block_bytes, left;

  FirstBlocks(const char* weight, Range blocks, int64_t block_bytes)
      : at(weight + blocks.begin * block_bytes),
        block_bytes(block_bytes),
        left(blocks.begin + 1 < blocks.end ? block_bytes : 0) {}

  void fetch() {
    for (int64_t line = 0; line < 2 && left > 0; ++line, at += 64, left -= 64) {
      prefetch_l2(at);
      prefetch_l2(at + block_bytes);
    }
  }
};

// The scale of a quantised row, and the products of its codes with -128, from which its sums start: codes of weights
// are stored with 128 more.
struct QuantisedRow {
  float scale;
  int32_t start;
};

// Quantises a row into tiles and prefetches `ahead` meanwhile.
template <class T>
static inline QuantisedRow quantise_into(const T* from, int64_t k, const PackedRows& to, int64_t row_tile, int64_t r,
                                         FirstBlocks& ahead) {
  const auto codes_at = [&](int64_t t) {
    return reinterpret_cast<int8_t*>(to.tiles(t / to.panel, row_tile) + t % to.panel * kTileBytes + r * 64);
  };
  const float scale = quantise_row(from, k, [&](int64_t t) {
    ahead.fetch();
    return codes_at(t);
  });
  int32_t start = 0;
  for (int64_t t = 0; t < to.k_tiles; ++t) start += start_of(codes_at(t), kInt8Zero);
  return {scale, start};
}

// How the sums of a block become values: by the scale of the row and those of the outputs.
struct Int8Scaling {
  const QuantisedRow* rows;
  const float* scales;

  Vec32 values(const float* sums, int64_t step, int64_t row, int64_t block) const {
    Vec32 to;
    for (int v = 0; v < 2; ++v) {
      const Ints exact = add(load_ints(sums + v * step), words(rows[row].start));
      to[v] = scaled(exact, rows[row].scale, scales + block * kBlockN + v * kLanes);
    }
    return to;
  }
};

// Computes results of at most 16 rows, which are packed in one panel; finish as in multiply_stripe.
template <int kParts, class Finish>
static void stream_results(const PackedRows& rows, int64_t m, const char* weight, Range results, const Finish& finish) {
  const Tiles tiles(stream_tiles(m));
  const Range own{results.begin * kParts, results.end * kParts};
  stream_blocks<Int8Dot>({rows.data, 64, kTileBytes}, m, weight, own, rows.k_tiles, stream_finish<kParts>(finish, own));
}

}  // namespace tilerank::TR_RUNG
