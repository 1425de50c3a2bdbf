// What surrounds the AMX micro-kernels: which part of a product a thread computes, and what becomes of its sums
// (include after gemm_amx-inl.h).
#pragma once

namespace tilerank::TR_RUNG {

// How the sums of a block become values: as they are.
struct Unscaled {
  // Returns the values of row `row`, whose vectors of sums are `step` floats apart.
  Vec32 values(const float* sums, int64_t step, int64_t, int64_t) const { return load32(sums, step); }
};

// The finish of every product in tiles: scales the sums of each row and passes the values of its first and its last
// block to `to`, which has a method write(row, result, values, values) and may prefetch what it writes.
template <int kParts, class To, class Scaling = Unscaled>
struct ProductFinish {
  const To& to;
  Scaling scaling = {};

  void prefetch(Range rows, int64_t result) const {
    if constexpr (requires { to.prefetch(rows, result, prefetch_write); }) to.prefetch(rows, result, prefetch_write);
  }
  void write(const float* const (&parts)[kParts], Range rows, int64_t result) const {
    for_sums(rows, [&](int64_t row, int64_t i) {
      const auto values = [&](int part) {
        return scaling.values(parts[part] + i, kTileRows * kLanes, row, result * kParts + part);
      };
      const Vec32 first = values(0);
      to.write(row, result, first, kParts == 2 ? values(kParts - 1) : first);
    });
  }
};

// The part of a product's output that a thread computes. Threads form a grid. Rows are split first, as long as each
// thread keeps `least` row tiles, enough to amortise reading the weight; then results.
struct Grid {
  Range row_tiles, results;

  Grid(const Team& team, int64_t row_tiles, int64_t results, int64_t least) {
    int row_threads = 1;
    while (team.count % (row_threads * 2) == 0 && row_tiles >= row_threads * 2 * least) row_threads *= 2;
    this->row_tiles = Team(nullptr, team.index % row_threads, row_threads).share(row_tiles, 2);
    this->results = Team(nullptr, team.index / row_threads, team.count / row_threads).share(results);
  }

  // Calls f(stripe) for this thread's row tiles, `stripe` at a time.
  template <class F>
  void for_stripes(int64_t stripe, const F& f) const {
    for (int64_t tile = row_tiles.begin; tile < row_tiles.end; tile += stripe) {
      f(Range{tile, std::min(tile + stripe, row_tiles.end)});
    }
  }
};

}  // namespace tilerank::TR_RUNG
