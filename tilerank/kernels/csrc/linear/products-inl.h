// Products of packed rows with consecutive blocks of a packed weight, compiled once per rung (no include guard; include
// after panels-inl.h).

namespace tilerank::TR_RUNG {

constexpr int64_t kStripe = 224 / kPanelRows;  // panels of a stripe: a part of k of their rows stays in the L2 cache
constexpr int64_t kManyPanels = 12;            // from this number on, expanding a bf16 weight to fp32 first pays
constexpr int64_t kStripeBlocks = 16;          // blocks whose sums with a stripe stay in the L2 cache as well

template <class T>
constexpr bool kExpands = std::is_same_v<T, bf16> && !kPaired<T>;

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
  return (std::min(m, kStripe * kPanelRows) * kStripeBlocks + kPartUnits) * kBlockN * sizeof(float);
}

// Multiplies a stripe with at most kStripeBlocks blocks, part by part of k. A part of a block is expanded at most once
// for all panels, and the next one is prefetched during the products.
template <class T, class Emit>
static void multiply_stripe(const RowPanels<T>& x, Range panels, const PackedBlocks<T>& weight, int64_t parts,
                            Range results, float* memory, const Emit& emit) {
  const int64_t first_row = x.first_row(panels.begin), rows = x.first_row(panels.end) - first_row;
  const Range blocks{results.begin * parts, results.end * parts};
  float* const expanded = memory;
  const auto sums_of = [&](int64_t block, int64_t row) {
    return memory + (kPartUnits + (block - blocks.begin) * rows + row - first_row) * kBlockN;
  };
  const bool expands = kExpands<T> && panels.end - panels.begin >= kManyPanels;
  const int64_t ahead_step = std::max<int64_t>(kUnitBytes<T> / (panels.end - panels.begin), 8);
  for (int64_t part = 0; part < x.units; part += kPartUnits) {
    const int64_t units = std::min(kPartUnits, x.units - part);
    const bool last_part = part + units == x.units;
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
      const char* const source = weight.at(block, part);
      const bool in_part = block + 1 < blocks.end || last_part;  // else the first block's next part follows
      const char* const next =
          in_part ? weight.at(block + 1, block + 1 < blocks.end ? part : 0) : weight.at(blocks.begin, part + units);
      if (expands) expand(reinterpret_cast<const bf16*>(source), units, expanded);
      for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
        const int64_t row = x.first_row(panel), count = x.rows(panel);
        float* const sums = sums_of(block, row);
        const int64_t offset = (panel - panels.begin) * ahead_step;
        const bool fetches = offset < kUnitBytes<T>;
        const Prefetch ahead = fetches ? Prefetch{next + offset * units, ahead_step} : Prefetch{next, 0};
        const auto multiply = [&](const auto* data) {
          for_rows<kPanelRows>(
              count, [&](auto r) { multiply_panel<r>(x.at(panel, part), data, units, sums, part > 0, ahead); });
        };
        if constexpr (kExpands<T>) {
          if (expands) {
            multiply(expanded);
          } else {
            multiply(reinterpret_cast<const T*>(source));
          }
        } else {
          multiply(reinterpret_cast<const T*>(source));
        }
        if (!last_part || (block + 1) % parts) continue;
        const float* const first = sums_of(block + 1 - parts, row);
        for (int64_t r = 0; r < count; ++r) emit(row + r, block / parts, first + r * kBlockN, sums + r * kBlockN);
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
    constexpr int64_t kAhead = 3 << 10;
    const int64_t ahead_in_order = follows_streams() ? 0 : kAhead;  // 0: prefetches the line being read, at no cost
    for (int64_t block = results.begin * parts; block < results.end * parts; ++block) {
      const char* const data = weight.at(block, 0);
      float* const last = sums + block % parts * x.m * kBlockN;
      for_rows<kPanelRows>(x.m, [&](auto r) {
        multiply_panel<r>(x.at(0, 0), reinterpret_cast<const T*>(data), x.units, last, false,
                          Prefetch{data + (r <= kRowsInOrder ? ahead_in_order : kAhead), kUnitBytes<T>});
      });
      if ((block + 1) % parts) continue;
      for (int64_t r = 0; r < x.m; ++r) emit(r, block / parts, sums + r * kBlockN, last + r * kBlockN);
    }
    return;
  }
  const int64_t group = kStripeBlocks / parts;
  for (int64_t panel = 0; panel < x.panels; panel += kStripe) {
    const Range stripe{panel, std::min(panel + kStripe, x.panels)};
    for (int64_t result = results.begin; result < results.end; result += group) {
      const Range some{result, std::min(result + group, results.end)};
      multiply_stripe(x, stripe, weight, parts, some, sums, emit);
    }
  }
}

}  // namespace tilerank::TR_RUNG
