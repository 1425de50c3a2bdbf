// Products of rows with the weights of grouped.h in vectors, for the rung that includes this file (no include guard;
// gemm.h and grouped_formats.h come before).

namespace tilerank::TR_RUNG {

// The memory that multiply_grouped works with, for at most kGroupedRows rows.
constexpr int64_t kGroupedRows = 20 * kRows;

template <class Format>
static size_t grouped_bytes(const Format& weight) {
  return (weight.group_tiles * kTile + kGroupedRows * kBlockN) * sizeof(float);
}

static inline float sum_of_inputs(const bf16* x, int64_t count) {
  Vec total = zero();
  for (int64_t i = 0; i < count; i += kLanes) total = total + load(x + i, std::min<int64_t>(kLanes, count - i));
  return sum(total);
}

// emit(row, Vec[kVecs]) gets the sums of rows [0, m) with a block; rows(row) is where its k inputs are. Group by group:
// the products with its values, less zero * (sum of the inputs), times the scale, are added, fused.
template <class Format, class Rows, class Emit>
static void multiply_grouped(const Rows& rows, int64_t m, const Format& weight, int64_t block, int64_t k, void* memory,
                             const Emit& emit) {
  bf16* const expanded = static_cast<bf16*>(memory);
  float* const totals = reinterpret_cast<float*>(expanded + weight.group_tiles * 2 * kTile);
  const int64_t group_inputs = weight.group_tiles * kBlockK;
  std::fill_n(totals, m * kBlockN, 0.0f);
  for (int64_t group = 0; group < weight.groups; ++group) {
    const int64_t first = group * group_inputs, inputs = std::min(group_inputs, k - first);
    Vec scales[kVecs], less[kVecs];
    const char* const values = weight.tile(block, group * weight.group_tiles);
    for (int64_t tile = 0; tile < blocks(inputs, kBlockK) * 2; ++tile) {
      Format::expand(values + tile * Format::kPackedTile, expanded + tile * kTile);
    }
    for (int v = 0; v < kVecs; ++v) {
      scales[v] = weight.scale(block, group, v);
      if (weight.has_zeros()) less[v] = weight.negative_zero(block, group, v);
    }
    multiply_block([&](int64_t row) { return rows(row) + first; }, m, expanded, inputs,
                   [&](int64_t row, const Vec* products) {
                     float* const to = totals + row * kBlockN;
                     const Vec x_sum = weight.has_zeros() ? set(sum_of_inputs(rows(row) + first, inputs)) : zero();
                     for (int v = 0; v < kVecs; ++v) {
                       const Vec group_sum = weight.has_zeros() ? fma(less[v], x_sum, products[v]) : products[v];
                       store(to + v * kLanes, fma(group_sum, scales[v], load(to + v * kLanes)));
                     }
                   });
  }
  for (int64_t row = 0; row < m; ++row) {
    Vec sums[kVecs];
    for (int v = 0; v < kVecs; ++v) sums[v] = load(totals + row * kBlockN + v * kLanes);
    emit(row, sums);
  }
}

}  // namespace tilerank::TR_RUNG
