// Products of packed rows with consecutive blocks of a packed weight, compiled once per rung (no include guard; include
// after panels-inl.h).

namespace tilerank::TR_RUNG {

constexpr int64_t kStripe = 224 / kPanelRows;  // panels of a stripe: a part of k of their rows stays in the L2 cache
constexpr int64_t kManyPanels = kLanes == 16 ? 12 : 6;  // from this number on, products take longer than reading
constexpr int64_t kStripeBlocks = 16;                   // blocks whose sums with a stripe stay in the L2 cache as well
// Tiles of a block that all panels multiply in turn, from the L1 cache. Few panels leave a tile soon, so that weights
// are read at an even rate; many load and store their sums less often.
constexpr int64_t kFewPanelsTiles = kLanes == 16 ? 2 : 1, kManyPanelsTiles = 6;
constexpr int64_t kAhead = 3 << 10;  // bytes from a line in use to the one that is prefetched

// Whether many panels multiply a bf16 weight expanded to fp32. AVX2 has free slots to expand it in each product.
template <class T>
constexpr bool kExpands = std::is_same_v<T, bf16> && !kPaired<T> && kLanes == 16;

// The blocks of a weight over k inputs.
template <class T>
struct PackedBlocks {
  const char* at(int64_t block, int64_t unit) const {
    return reinterpret_cast<const char*>(data + block * block_elements<T>(k)) + unit * kUnitBytes<T>;
  }

  const T* data;
  int64_t k;
};

// Expands tiles of a bf16 weight to fp32: panel[unit][32 outputs].
static inline void expand(const bf16* tiles, int64_t units, float* panel) {
  for (int64_t first = 0; first < units; first += kTileK, tiles += 2 * kTile) {
    for (const bf16* pair = tiles; pair != tiles + std::min(kTileK, units - first) * 16; pair += 32) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        const Two w = load_pairs(vector_of_pair(pair, v));
        store(panel + v * kLanes, w.a);
        store(panel + kBlockN + v * kLanes, w.b);
      }
      panel += 2 * kBlockN;
    }
  }
}

// Bytes of the buffer `memory` of multiply_results.
template <class T>
static size_t products_bytes(int64_t m) {
  return (std::min(m, kStripe * kPanelRows) * kStripeBlocks + kManyPanelsTiles * kTileK) * kBlockN * sizeof(float);
}

// Multiplies a stripe with at most kStripeBlocks blocks, part by part of k. Within a part, all panels multiply some
// tiles of a block, expanded at most once, before the next ones: weights are read from memory once and in order.
template <class T, class Emit>
static void multiply_stripe(const RowPanels<T>& x, Range panels, const PackedBlocks<T>& weight, int64_t parts,
                            Range results, float* memory, const Emit& emit) {
  const int64_t first_row = x.first_row(panels.begin), rows = x.first_row(panels.end) - first_row;
  const int64_t count = panels.end - panels.begin;
  const bool many = count >= kManyPanels, expands = kExpands<T> && many;
  const int64_t piece = (many ? kManyPanelsTiles : kFewPanelsTiles) * kTileUnits<T>;
  const Range blocks{results.begin * parts, results.end * parts};
  float* const expanded = memory;
  float* const sums = memory + kManyPanelsTiles * kTileK * kBlockN;
  const auto sums_of = [&](int64_t block, int64_t row) {
    return sums + ((block - blocks.begin) * rows + row - first_row) * kBlockN;
  };
  for (int64_t part = 0, part_end; part < x.units; part = part_end) {
    part_end = std::min(part + x.part, x.units);
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
      for (int64_t unit = part; unit < part_end; unit += piece) {
        const int64_t units = std::min(piece, part_end - unit);
        const char* const source = weight.at(block, unit);
        if (expands) expand(reinterpret_cast<const bf16*>(source), units, expanded);
        for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
          const Unit<T>* const inputs = x.at(panel, unit);
          float* const to = sums_of(block, x.first_row(panel));
          // Each panel prefetches its share of the lines.
          const int64_t begin = (panel - panels.begin) * units * kUnitBytes<T> / count;
          const Prefetch ahead{source + kAhead + begin, tilerank::blocks(64, count)};
          for_rows<kPanelRows>(x.rows(panel), [&](auto r) {
            if constexpr (kExpands<T>) {
              if (expands) return multiply_panel<r>(inputs, expanded, units, to, unit > 0, ahead);
            }
            multiply_panel<r>(inputs, reinterpret_cast<const T*>(source), units, to, unit > 0, ahead);
          });
        }
      }
      if (part_end < x.units || (block + 1) % parts) continue;
      for (int64_t row = first_row; row < first_row + rows; ++row) {
        emit(row, block / parts, sums_of(block + 1 - parts, row), sums_of(block, row));
      }
    }
  }
}

// Computes `results` of all rows. emit(row, result, first, last) receives the sums of a row with the first and the last
// of the `parts` blocks (1 or 2) of a result, float[32] each. memory: products_bytes(x.m) bytes
template <class T, class Emit>
static void multiply_results(const RowPanels<T>& x, const PackedBlocks<T>& weight, int64_t parts, Range results,
                             void* memory, const Emit& emit) {
  float* const sums = static_cast<float*>(memory);
  if (x.panels == 1) {
    // Bound by memory: the weight is loaded in order, straight into registers.
    // 0 prefetches the line being read, at no cost. With AVX2, products of two rows are slow enough to need prefetches.
    const int64_t ahead_in_order = follows_streams() ? 0 : kAhead;
    constexpr int kFewRows = kLanes == 16 ? kRowsInOrder : 1;
    for (int64_t block = results.begin * parts; block < results.end * parts; ++block) {
      const char* const data = weight.at(block, 0);
      float* const last = sums + block % parts * x.m * kBlockN;
      for_rows<kPanelRows>(x.m, [&](auto r) {
        multiply_panel<r>(x.at(0, 0), reinterpret_cast<const T*>(data), x.units, last, false,
                          Prefetch{data + (r <= kFewRows ? ahead_in_order : kAhead), 64});
      });
      if ((block + 1) % parts) continue;
      for (int64_t r = 0; r < x.m; ++r) emit(r, block / parts, sums + r * kBlockN, last + r * kBlockN);
    }
    return;
  }
  const int64_t group = x.units <= x.part ? 1 : kStripeBlocks / parts;
  for (int64_t panel = 0; panel < x.panels; panel += kStripe) {
    const Range stripe{panel, std::min(panel + kStripe, x.panels)};
    for (int64_t result = results.begin; result < results.end; result += group) {
      const Range some{result, std::min(result + group, results.end)};
      multiply_stripe(x, stripe, weight, parts, some, sums, emit);
    }
  }
}

}  // namespace tilerank::TR_RUNG
