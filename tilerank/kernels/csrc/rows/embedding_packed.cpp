// embedding_packed: rows of a packed weight, zeros for ids that this shard does not hold. For embeddings that share
// their weight with the output head.
#ifndef TR_RUNG
#include "core/entry.h"
#include "linear/pack.h"

#define TR_SOURCE "rows/embedding_packed.cpp"
#include "simd/foreach_isa.h"

#else

namespace tilerank::TR_RUNG {

// Columns [begin, end) of row n, a block of kTileK at a time.
static inline void unpack_row(bf16* to, const bf16* data, int64_t n, int64_t k, Range columns) {
  const int64_t k_blocks = blocks(k, kTileK);
  const bf16* const outputs = data + n / kBlockN * k_blocks * 2 * kTile + n % kBlockN / 16 * kTile + n % 16 * 2;
  for (int64_t column = columns.begin; column < columns.end; column += kTileK) {
    const bf16* const tile = outputs + column / kTileK * 2 * kTile;
    const int64_t count = std::min(kTileK, columns.end - column);
    int64_t i = 0;
    for (; i + 2 <= count; i += 2) std::memcpy(to + column + i, tile + i * 16, 4);
    if (i < count) to[column + i] = tile[i * 16];
  }
}

static inline void unpack_row(float* to, const float* data, int64_t n, int64_t k, Range columns) {
  const float* const outputs = data + n / kBlockN * k * kBlockN + n % kBlockN;
  for (int64_t column = columns.begin; column < columns.end; ++column) to[column] = outputs[column * kBlockN];
}

TR_ENTRY(embedding_packed, Team& team, const Tensor& ids, int64_t first_row, int64_t n, int64_t k, const Tensor& weight,
         const Tensor& out) {
  // Tasks of 512 columns: a lone row of a decode step is read by several threads, since its pairs lie far apart.
  constexpr int64_t kColumns = 512;
  const int64_t parts = blocks(k, kColumns);
  const Range tasks = team.share(ids.size[0] * parts);
  for (int64_t task = tasks.begin; task < tasks.end; ++task) {
    const int64_t row = ids.as<int64_t>()[task / parts * ids.stride[0]] - first_row;
    const int64_t column = task % parts * kColumns;
    const Range columns{column, std::min(column + kColumns, k)};
    for_float(weight.dtype, [&](auto type) {
      using T = decltype(type);
      T* const to = out.as<T>() + task / parts * k;
      if (row < 0 || row >= n) {
        std::memset(to + columns.begin, 0, static_cast<size_t>(columns.end - columns.begin) * sizeof(T));
      } else {
        unpack_row(to, weight.as<const T>(), row, k, columns);
      }
    });
  }
}

}  // namespace tilerank::TR_RUNG
#endif
