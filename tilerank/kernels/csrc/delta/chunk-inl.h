// What a chunk of rows needs before the products with the state, for the rung that includes this file (no include
// guard). kernels/reference/delta.py has the algorithm.

namespace tilerank::TR_RUNG {

constexpr int64_t kChunk = 64;

// Rows of a block of a product, and vectors of its columns: as many sums as there are registers for.
#ifdef TR_AVX512
constexpr int kBlockRows = 8;
#else
constexpr int kBlockRows = 4;
#endif
constexpr int kBlockVecs = 2;
constexpr int64_t kPanel = kBlockVecs * kLanes;  // columns of a state that are computed together

struct Block {
  Vec sums[kBlockRows][kBlockVecs] = {};
};

// sums += rows of a [., depth] times b [depth, kPanel]; row strides in elements. The sum of an element runs in order of
// the depth.
[[gnu::always_inline]] static inline void accumulate(const float* a, int64_t a_row, const float* b, int64_t b_row,
                                                     int64_t depth, Block& block) {
  for (int64_t k = 0; k < depth; ++k) {
    Vec values[kBlockVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kBlockVecs; ++v) values[v] = load(b + k * b_row + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kBlockRows; ++r) {
      const Vec factor = set(a[r * a_row + k]);
#pragma GCC unroll 4
      for (int v = 0; v < kBlockVecs; ++v) block.sums[r][v] = fma(factor, values[v], block.sums[r][v]);
    }
  }
}

// The first n of kLanes columns; n may be less than 1 or larger than kLanes.
template <class T>
static inline Vec load_columns(const T* p, int64_t n) {
  return n >= kLanes ? load(p) : n > 0 ? load(p, n) : zero();
}
template <class T>
static inline void store_columns(T* p, Vec x, int64_t n) {
  if (n >= kLanes) {
    store(p, x);
  } else if (n > 0) {
    store(p, x, n);
  }
}

// The n rows of a chunk for one key head. `rows` is n rounded up to a multiple of `unit`; the rows between are
// zeros.
struct ChunkKeys {
  int64_t n, rows, unit, dk;
  int64_t width;                   // dk rounded up to a multiple of unit; the columns between are zeros
  float *q, *k;                    // [kChunk, width], of length 1 / sqrt(dk) and 1
  float* k_columns;                // [width, kChunk], k transposed
  float *q_products, *k_products;  // [kChunk, kChunk], of q and k with k: the lower triangles

  static constexpr int64_t floats(int64_t width) { return 3 * kChunk * width + 2 * kChunk * kChunk; }

  ChunkKeys(float* memory, int64_t dk, int64_t unit)
      : n(0),
        rows(0),
        unit(unit),
        dk(dk),
        width((dk + unit - 1) / unit * unit),
        q(memory),
        k(q + kChunk * width),
        k_columns(k + kChunk * width),
        q_products(k_columns + kChunk * width),
        k_products(q_products + kChunk * kChunk) {}

  template <class T>
  void read(const DeltaProblem<T>& p, int64_t first_row, int64_t count, int64_t key_head) {
    n = count;
    rows = (n + unit - 1) / unit * unit;
    for (int64_t i = 0; i < rows; ++i) {
      float *const q_row = q + i * width, *const k_row = k + i * width;
      std::fill_n(q_row, width, 0.0f);
      std::fill_n(k_row, width, 0.0f);
      if (i >= n) continue;
      unit_row(p.q(first_row + i, key_head), dk, 1.0f / std::sqrt(static_cast<float>(dk)), q_row);
      unit_row(p.k(first_row + i, key_head), dk, 1.0f, k_row);
    }
    for (int64_t i = 0; i < kChunk; i += kLanes) transpose_rows(i);
  }

  void multiply() {
    for (int64_t i = 0; i < rows; i += kBlockRows) {
      for (int64_t j = 0; j < i + kBlockRows; j += kPanel) {
        multiply_block(q, q_products, i, j);
        multiply_block(k, k_products, i, j);
      }
    }
  }

 private:
  // Writes rows i to i + kLanes of k as columns, those beyond `rows` as zeros.
  void transpose_rows(int64_t i) const {
    for (int64_t column = 0; column < width; column += kLanes) {
      Vec from[kLanes], to[kLanes];
      for (int r = 0; r < kLanes; ++r) {
        from[r] = i + r < rows ? load_columns(k + (i + r) * width + column, width - column) : zero();
      }
      transpose(from, to);
      const int64_t count = std::min<int64_t>(kLanes, width - column);
      for (int64_t c = 0; c < count; ++c) store(k_columns + (column + c) * kChunk + i, to[c]);
    }
  }

  void multiply_block(const float* a, float* products, int64_t i, int64_t j) const {
    Block block;
    accumulate(a + i * width, width, k_columns + j, kChunk, dk, block);
    for (int r = 0; r < kBlockRows; ++r) {
      for (int v = 0; v < kBlockVecs; ++v) store(products + (i + r) * kChunk + j + v * kLanes, block.sums[r][v]);
    }
  }
};

// A chunk with its decays for one value head. With c the running sum of g from the chunk's beginning on:
struct ChunkDecays {
  float* lower;               // [kChunk, kChunk]: -beta_i * (k_i . k_j) * exp(c_i - c_j) for j < i, else 0
  float* scores;              // [kChunk, kChunk]: (q_i . k_j) * exp(c_i - c_j) for j <= i, else 0
  float* k_columns;           // [width, kChunk]: k_j * exp(c_last - c_j), transposed
  float *since_start, *beta;  // [kChunk]: exp(c_i); beta_i, 0 for rows beyond the chunk
  float whole;                // exp(c_last)

  static constexpr int64_t floats(int64_t width) { return 2 * kChunk * kChunk + kChunk * width + 2 * kChunk; }

  ChunkDecays(float* memory, int64_t width)
      : lower(memory),
        scores(lower + kChunk * kChunk),
        k_columns(scores + kChunk * kChunk),
        since_start(k_columns + kChunk * width),
        beta(since_start + kChunk),
        whole(0) {}

  // g, betas: rows of [t, value_heads]
  void read(const ChunkKeys& keys, const Tensor& g, const Tensor& betas, int64_t first_row, int64_t value_head) {
    // c as a sum of two floats, so that differences of large values keep their digits.
    alignas(64) float high[kChunk], low[kChunk], until_end[kChunk];
    double c = 0;
    for (int64_t i = 0; i < kChunk; ++i) {
      if (i < keys.n) c += static_cast<double>(g.row<float>(first_row + i)[value_head]);
      high[i] = static_cast<float>(c);
      low[i] = static_cast<float>(c - static_cast<double>(high[i]));
      beta[i] = i < keys.n ? betas.row<float>(first_row + i)[value_head] : 0.0f;
    }
    for (int64_t i = 0; i < kChunk; i += kLanes) {
      store(since_start + i, exp(load(high + i)));
      store(until_end + i, exp((set(high[kChunk - 1]) - load(high + i)) + (set(low[kChunk - 1]) - load(low + i))));
    }
    whole = since_start[kChunk - 1];
    for (int64_t i = 0; i < keys.rows; ++i) {
      float *const lower_row = lower + i * kChunk, *const scores_row = scores + i * kChunk;
      std::fill_n(lower_row, kChunk, 0.0f);
      std::fill_n(scores_row, kChunk, 0.0f);
      for_lanes(i + 1, [&](int64_t j, auto lanes) {
        const Vec decay = exp((set(high[i]) - lanes.load(high + j)) + (set(low[i]) - lanes.load(low + j)));
        lanes.store(scores_row + j, lanes.load(keys.q_products + i * kChunk + j) * decay);
        lanes.store(lower_row + j, lanes.load(keys.k_products + i * kChunk + j) * decay * set(-beta[i]));
      });
      lower_row[i] = 0.0f;
    }
    for (int64_t column = 0; column < keys.width; ++column) {
      for (int64_t j = 0; j < kChunk; j += kLanes) {
        store(k_columns + column * kChunk + j, load(keys.k_columns + column * kChunk + j) * load(until_end + j));
      }
    }
  }
};

}  // namespace tilerank::TR_RUNG
