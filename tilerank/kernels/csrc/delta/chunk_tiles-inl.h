// The delta rule for a chunk of rows and a panel of columns of the state, with AMX tiles. Included inside the amx
// region.
//
// Operands are split, x = high + low, both bf16, and a product is the sum of high * high, high * low and low * high:
// its error is some 2^-17 of the factors' magnitudes. Only the updates are solved for in fp32 vectors. Products are
// made of blocks of 32 x 32 results, two by two tiles.
#pragma once

namespace tilerank::TR_RUNG {

constexpr int64_t kTileFloats = 512;  // two tiles, high and low, of 1 KiB each, counted in floats

// Tiles [count][depth] of split numbers.
struct SplitTiles {
  float* data;
  int64_t depth;

  static constexpr int64_t floats(int64_t count, int64_t depth) { return count * depth * kTileFloats; }
  float* at(int64_t tile, int64_t t) const { return data + (tile * depth + t) * kTileFloats; }
  float* end(int64_t count) const { return data + floats(count, depth); }

  // The left operand of a product: tiles of 16 rows of 32 columns, from [16 * count, 32 * depth].
  void pack_left(const float* from, int64_t stride, int64_t count) const {
    for (int64_t tile = 0; tile < count; ++tile) {
      for (int64_t t = 0; t < depth; ++t) {
        __m256i* const to = reinterpret_cast<__m256i*>(at(tile, t));
        for (int64_t half = 0; half < 32; ++half) {
          const Vec x = load(from + (16 * tile + half / 2) * stride + 32 * t + half % 2 * 16);
          const __m256i high = narrow(x);
          _mm256_store_si256(to + half, high);
          _mm256_store_si256(to + 32 + half, narrow(x - widen(high)));
        }
      }
    }
  }

  // The right operand: tiles of 16 pairs of rows and 16 columns, from [32 * depth, kPanel].
  void pack_right(const float* from) const {
    for (int64_t tile = 0; tile < kBlockVecs; ++tile) {
      for (int64_t t = 0; t < depth; ++t) {
        __m512i* const to = reinterpret_cast<__m512i*>(at(tile, t));
        for (int64_t pair = 0; pair < 16; ++pair) {
          const float* const rows = from + (32 * t + 2 * pair) * kPanel + 16 * tile;
          const Two x = {load(rows), load(rows + kPanel)};
          const __m512i high = narrow_words(x);
          const Two rounded = widen_words(high);
          _mm512_store_si512(to + pair, high);
          _mm512_store_si512(to + 16 + pair, narrow_words({x.a - rounded.a, x.b - rounded.b}));
        }
      }
    }
  }

  // The right operand that is the transpose of a left one.
  void pack_transposed(const SplitTiles& left, int64_t count) const {
    for (int64_t i = 0; i < 2 * count * depth; ++i) {
      __m512i rows[16], columns[16];
      for (int r = 0; r < 16; ++r) rows[r] = _mm512_load_si512(left.data + (i * 16 + r) * 16);
      transpose(rows, columns);
      for (int r = 0; r < 16; ++r) _mm512_store_si512(data + (i * 16 + r) * 16, columns[r]);
    }
  }
};

// c [32, 32] = or, if `add`, += two tiles of rows of a times two of columns of b, over `depth` tiles. Every sum is one
// chain in the order of the depth.
static void multiply_block(float* c, int64_t c_stride, bool add, const SplitTiles& a, int64_t a_tile,
                           const SplitTiles& b, int64_t b_tile, int64_t depth) {
  const int64_t stride = c_stride * 4;
  float* const lower = c + 16 * c_stride;
  if (add) {
    tile_load<0>(c, stride);
    tile_load<1>(c + 16, stride);
    tile_load<2>(lower, stride);
    tile_load<3>(lower + 16, stride);
  } else {
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
  }
  const auto dots = [] {
    tile_dot_bf16<0, 4, 6>();
    tile_dot_bf16<1, 4, 7>();
    tile_dot_bf16<2, 5, 6>();
    tile_dot_bf16<3, 5, 7>();
  };
  for (int64_t t = 0; t < depth; ++t) {
    const float *const a0 = a.at(a_tile, t), *const a1 = a.at(a_tile + 1, t);
    const float *const b0 = b.at(b_tile, t), *const b1 = b.at(b_tile + 1, t);
    constexpr int64_t kLow = kTileFloats / 2;
    tile_load_block<4>(a0);
    tile_load_block<5>(a1);
    tile_load_block<6>(b0 + kLow);
    tile_load_block<7>(b1 + kLow);
    dots();
    tile_load_block<6>(b0);
    tile_load_block<7>(b1);
    dots();
    tile_load_block<4>(a0 + kLow);
    tile_load_block<5>(a1 + kLow);
    dots();
  }
  tile_store<0>(c, stride);
  tile_store<1>(c + 16, stride);
  tile_store<2>(lower, stride);
  tile_store<3>(lower + 16, stride);
}

class TilePanel {
 public:
  static constexpr int64_t kUnit = 32;
  static_assert(kPanel == 32 && kChunk == 64);

  static constexpr int64_t floats(int64_t width) {
    const int64_t depth = width / 32;
    return 3 * SplitTiles::floats(4, depth) + SplitTiles::floats(4, 2) + SplitTiles::floats(2 * depth, 2) +
           SplitTiles::floats(2, depth) + SplitTiles::floats(2, 2) + 3 * kChunk * kPanel;
  }

  TilePanel(float* memory, ChunkKeys& keys, const ChunkDecays& decays)
      : keys_(keys),
        decays_(decays),
        depth_(keys.width / 32),
        q_{memory, depth_},
        k_{q_.end(4), depth_},
        k_right_{k_.end(4), depth_},
        scores_{k_right_.end(4), 2},
        k_columns_{scores_.end(4), 2},
        state_right_{k_columns_.end(2 * depth_), depth_},
        updates_right_{state_right_.end(2), 2},
        updates_(updates_right_.end(2)),
        predicted_(updates_ + kChunk * kPanel),
        outputs_(predicted_ + kChunk * kPanel),
        tiles_(whole_tiles()) {
    std::fill_n(updates_, kChunk * kPanel, 0.0f);
  }

  // Called when `keys` and when `decays` have been read.
  void begin_keys() {
    const int64_t count = keys_.rows / 16;
    q_.pack_left(keys_.q, keys_.width, count);
    k_.pack_left(keys_.k, keys_.width, count);
    k_right_.pack_transposed(k_, count);
    for (int64_t i = 0; i < keys_.rows; i += 32) {
      for (int64_t j = 0; j <= i; j += 32) {
        multiply_block(keys_.q_products + i * kChunk + j, kChunk, false, q_, i / 16, k_right_, j / 16, depth_);
        multiply_block(keys_.k_products + i * kChunk + j, kChunk, false, k_, i / 16, k_right_, j / 16, depth_);
      }
    }
  }
  void begin_decays() const {
    scores_.pack_left(decays_.scores, kChunk, keys_.rows / 16);
    k_columns_.pack_left(decays_.k_columns, kChunk, 2 * depth_);
  }

  // state: [width, kPanel], rows beyond dk zeros. v(i), o(i): pointers to `columns` columns of row i.
  template <class V, class O>
  void run(float* state, int64_t columns, const V& v, const O& o) const {
    state_right_.pack_right(state);
    for (int64_t i = 0; i < keys_.rows; i += 32) {
      multiply_block(predicted_ + i * kPanel, kPanel, false, k_, i / 16, state_right_, 0, depth_);
      multiply_block(outputs_ + i * kPanel, kPanel, false, q_, i / 16, state_right_, 0, depth_);
    }
    for (int64_t i = 0; i < keys_.rows; i += kBlockRows) {
      Block block;
      for (int r = 0; r < kBlockRows; ++r) {
        for (int n = 0; n < kBlockVecs; ++n) block.sums[r][n] = load(predicted_ + (i + r) * kPanel + n * kLanes);
      }
      solve(keys_, decays_, i, columns, v, block, updates_);
    }
    updates_right_.pack_right(updates_);
    add_outputs(columns, o);
    scale_rows(state, keys_.width, [&](int64_t) { return decays_.whole; });
    for (int64_t d = 0; d < keys_.width; d += 32) {
      multiply_block(state + d * kPanel, kPanel, true, k_columns_, d / 16, updates_right_, 0, keys_.rows / 32);
    }
  }

 private:
  static TileConfig whole_tiles() {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, 64);
    return config;
  }

  template <class F>
  static void scale_rows(float* rows, int64_t n, const F& factor) {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t column = 0; column < kPanel; column += kLanes) {
        float* const at = rows + i * kPanel + column;
        store(at, load(at) * set(factor(i)));
      }
    }
  }

  // o = exp(c) q S + scores u
  template <class O>
  void add_outputs(int64_t columns, const O& o) const {
    scale_rows(outputs_, keys_.rows, [&](int64_t i) { return decays_.since_start[i]; });
    for (int64_t i = 0; i < keys_.rows; i += 32) {
      multiply_block(outputs_ + i * kPanel, kPanel, true, scores_, i / 16, updates_right_, 0, i / 32 + 1);
    }
    for (int64_t i = 0; i < keys_.n; ++i) {
      for (int64_t column = 0; column < kPanel; column += kLanes) {
        store_columns(o(i) + column, load(outputs_ + i * kPanel + column), columns - column);
      }
    }
  }

  ChunkKeys& keys_;
  const ChunkDecays& decays_;
  const int64_t depth_;                                       // tiles in a row of q and k
  const SplitTiles q_, k_, k_right_;                          // [rows, width]; k_right_: transposed
  const SplitTiles scores_, k_columns_;                       // [rows, kChunk], [width, kChunk]
  const SplitTiles state_right_, updates_right_;              // [width, kPanel], [kChunk, kPanel]
  float *const updates_, *const predicted_, *const outputs_;  // [kChunk, kPanel]; predicted_: k S
  const Tiles tiles_;
};

}  // namespace tilerank::TR_RUNG
