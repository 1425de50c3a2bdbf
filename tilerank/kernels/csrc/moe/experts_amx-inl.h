// The projections of experts whose rows are kept in AMX tiles between the two: as PackedRows, one batch after the
// other (include after experts-inl.h and gemm_amx-inl.h).
#pragma once

namespace tilerank::TR_RUNG {

// Gate and up become rows in tiles, which the down projection reads.
template <class Rounds, bool kStreams>
struct ToMiddleTiles {
  const PackedRows& to;
  int64_t first_tile;  // the row tile of the first row
  Gate gate;

  void write(int64_t row, int64_t block, const Vec32& gates, const Vec32& ups) const {
    char* const tile = to.tiles(block / to.panel, first_tile + row / kTileRows) + block % to.panel * kTileBytes;
    bf16* const out = reinterpret_cast<bf16*>(tile) + row % kTileRows * kTileK;
    const Vec32 values = gate.apply<Rounds>(block, gates, ups);
    kStreams ? stream(out, values) : store(out, values);
  }
};

// Packs `count` rows, several side by side, which reads them faster than one after the other; row(i) points to the k
// inputs of row i.
template <class Row>
static void pack_rows(const Row& row, int64_t count, int64_t k, const PackedRows& to) {
  constexpr int64_t kRowsAtOnce = 8, kTilesAtOnce = 2;
  for (int64_t first = 0; first < count; first += kRowsAtOnce) {
    const int64_t end = std::min(first + kRowsAtOnce, count);
    const bf16* inputs[kRowsAtOnce];
    for (int64_t i = first; i < end; ++i) inputs[i - first] = row(i);
    for (int64_t tile = 0; tile < to.k_tiles; tile += kTilesAtOnce) {
      for (int64_t i = first; i < end; ++i) {
        pack_row(inputs[i - first], k, to, i / kTileRows, i % kTileRows,
                 {tile, std::min(tile + kTilesAtOnce, to.k_tiles)});
      }
    }
  }
}

// Product<parts> is one projection, made from its weight, the results and the inputs of an expert, and
// bytes(args) bytes of memory. stripe(row tiles) is the number of row tiles that are multiplied at a time,
// panel(row tiles) the panel of their PackedRows. It multiplies rows, which it packs first, or rows of `middle`:
//
//   multiply_rows(row, rows, batch, results, batches, destination)
//   multiply_tiles(middle, stripe, batch, results, batches, destination)
template <template <int> class Product, class Rounds, bool kStreams>
class TileExperts {
 public:
  using Arguments = ExpertsArgs<typename Product<1>::Weight>;
  using Input = bf16;
  static constexpr int64_t kMemoryBoundRows = Product<1>::kMemoryBoundRows;

  static size_t bytes(const Arguments& a) { return Product<1>::bytes(a); }
  TileExperts(const Arguments& args, const ExpertBatches& batches, char* memory)
      : a_(args),
        batches_(batches),
        gate_up_(args, args.gate_up, args.width_blocks, args.hidden, memory),
        down_(args, args.down, args.hidden_blocks, args.width, memory) {}

  void gate_up(const ExpertBatch& batch, Range own) const {
    const PackedRows middle = middle_of(batch);
    const int64_t stripe = gate_up_.stripe(middle.row_tiles);
    for (int64_t tile = 0; tile < middle.row_tiles; tile += stripe) {
      const int32_t* const pairs = batches_.order + batch.first + tile * kTileRows;
      const auto row = [&](int64_t i) { return a_.x.template row<const bf16>(pairs[i] / batches_.top); };
      const int64_t m = std::min(stripe * kTileRows, batch.rows - tile * kTileRows);
      const ToMiddleTiles<Rounds, kStreams> to{middle, tile, gate_of(a_, batch.expert)};
      gate_up_.multiply_rows(row, m, batch, own, batches_, to);
    }
  }

  void down(const ExpertBatch& batch, Range own) const {
    const PackedRows middle = middle_of(batch);
    const int64_t stripe = down_.stripe(middle.row_tiles);
    const ToChoices<kStreams> to(a_, batches_.order + batch.first, batch.expert);
    for (int64_t tile = 0; tile < middle.row_tiles; tile += stripe) {
      down_.multiply_tiles(middle, {tile, std::min(tile + stripe, middle.row_tiles)}, batch, own, batches_, to);
    }
  }

 private:
  PackedRows middle_of(const ExpertBatch& batch) const {
    const int64_t row_tiles = blocks(batch.rows, kTileRows);
    return {a_.middle.template as<char>() + batch.row_tile * a_.width_blocks * kTileBytes, row_tiles, a_.width_blocks,
            down_.panel(row_tiles)};
  }

  const Arguments& a_;
  const ExpertBatches& batches_;
  const Product<2> gate_up_;
  const Product<1> down_;
};

}  // namespace tilerank::TR_RUNG
