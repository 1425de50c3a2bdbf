// The delta rule for a chunk of rows and a panel of columns of the state, in fp32 vectors, for the rung that includes
// this file (no include guard).

namespace tilerank::TR_RUNG {

// Rows i to i + kBlockRows of the updates u [kChunk, kPanel]: (1 - lower) u = beta (v - exp(c) k S). block: these rows
// of k S. v(i): a pointer to `columns` columns of row i.
template <class V>
static inline void solve(const ChunkKeys& keys, const ChunkDecays& decays, int64_t i, int64_t columns, const V& v,
                         Block& block, float* updates) {
  for (int r = 0; r < kBlockRows; ++r) {
    const Vec decay = set(decays.since_start[i + r]), beta = set(decays.beta[i + r]);
    for (int n = 0; n < kBlockVecs; ++n) {
      const Vec value = i + r < keys.n ? load_columns(v(i + r) + n * kLanes, columns - n * kLanes) : zero();
      block.sums[r][n] = (value - decay * block.sums[r][n]) * beta;
    }
  }
  const float* const lower = decays.lower + i * kChunk;
  accumulate(lower, kChunk, updates, kPanel, i, block);
#pragma GCC unroll 8
  for (int r = 0; r < kBlockRows; ++r) {
#pragma GCC unroll 8
    for (int s = 0; s < r; ++s) {
      const Vec factor = set(lower[r * kChunk + i + s]);
      for (int n = 0; n < kBlockVecs; ++n) block.sums[r][n] = fma(factor, block.sums[s][n], block.sums[r][n]);
    }
    for (int n = 0; n < kBlockVecs; ++n) store(updates + (i + r) * kPanel + n * kLanes, block.sums[r][n]);
  }
}

class VectorPanel {
 public:
  static constexpr int64_t kUnit = kBlockRows;
  static constexpr int64_t floats(int64_t) { return kChunk * kPanel; }

  VectorPanel(float* memory, ChunkKeys& keys, const ChunkDecays& decays)
      : updates_(memory), keys_(keys), decays_(decays) {}

  // Called when `keys` and when `decays` have been read.
  void begin_keys() { keys_.multiply(); }
  void begin_decays() {}

  // state: [width, kPanel], rows beyond dk zeros. v(i), o(i): pointers to `columns` columns of row i.
  template <class V, class O>
  void run(float* state, int64_t columns, const V& v, const O& o) {
    for (int64_t i = 0; i < keys_.rows; i += kBlockRows) {
      Block block;
      accumulate(keys_.k + i * keys_.width, keys_.width, state, kPanel, keys_.dk, block);
      solve(keys_, decays_, i, columns, v, block, updates_);
    }
    for (int64_t i = 0; i < keys_.rows; i += kBlockRows) add_outputs(state, i, columns, o);
    for (int64_t d = 0; d < keys_.width; d += kBlockRows) update(state, d);
  }

 private:
  // o = exp(c) q S + scores u
  template <class O>
  void add_outputs(const float* state, int64_t i, int64_t columns, const O& o) const {
    Block block;
    accumulate(keys_.q + i * keys_.width, keys_.width, state, kPanel, keys_.dk, block);
    for (int r = 0; r < kBlockRows; ++r) {
      const Vec decay = set(decays_.since_start[i + r]);
      for (int n = 0; n < kBlockVecs; ++n) block.sums[r][n] = block.sums[r][n] * decay;
    }
    accumulate(decays_.scores + i * kChunk, kChunk, updates_, kPanel, i + kBlockRows, block);
    for (int r = 0; r < kBlockRows && i + r < keys_.n; ++r) {
      for (int n = 0; n < kBlockVecs; ++n) {
        store_columns(o(i + r) + n * kLanes, block.sums[r][n], columns - n * kLanes);
      }
    }
  }

  // S = exp(c_last) S + (exp(c_last - c) k)^T u
  void update(float* state, int64_t d) const {
    Block block;
    for (int r = 0; r < kBlockRows; ++r) {
      for (int n = 0; n < kBlockVecs; ++n) {
        block.sums[r][n] = load(state + (d + r) * kPanel + n * kLanes) * set(decays_.whole);
      }
    }
    accumulate(decays_.k_columns + d * kChunk, kChunk, updates_, kPanel, keys_.rows, block);
    for (int r = 0; r < kBlockRows; ++r) {
      for (int n = 0; n < kBlockVecs; ++n) store(state + (d + r) * kPanel + n * kLanes, block.sums[r][n]);
    }
  }

  float* const updates_;  // [kChunk, kPanel]
  ChunkKeys& keys_;
  const ChunkDecays& decays_;
};

}  // namespace tilerank::TR_RUNG
