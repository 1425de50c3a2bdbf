// pack: converts rows of a weight to bf16 or fp32 and packs them (pack.h).
#ifndef TR_RUNG
#include <array>

#include "core/entry.h"
#include "linear/pack.h"

#define TR_SOURCE "linear/pack.cpp"
#include "simd/foreach_isa.h"

#else
#include "simd/blocks-inl.h"
#include "linear/source_rows-inl.h"
#include "simd/transpose-inl.h"

namespace tilerank::TR_RUNG {

// to[i] = from[i * stride] for i < n
template <class To, class From>
static void convert(To* to, const From* from, int64_t stride, int64_t n) {
  if constexpr (std::is_same_v<To, From>) {
    if (stride == 1) {
      std::memcpy(to, from, static_cast<size_t>(n) * sizeof(To));
      return;
    }
  }
  if constexpr (std::is_same_v<From, float> || std::is_same_v<From, bf16>) {
    if (stride == 1) {
      for (int64_t i = 0; i < n; i += kLanes) {
        const int64_t part = std::min<int64_t>(kLanes, n - i);
        store(to + i, load(from + i, part), part);
      }
      return;
    }
  }
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t part = std::min<int64_t>(kLanes, n - i);
    float values[kLanes] = {};
    for (int64_t j = 0; j < part; ++j) values[j] = as_float(from + (i + j) * stride);
    store(to + i, load(values), part);
  }
}

// The position of a rectangle in the packed weight: its first row and column.
struct Corner {
  int64_t row, col;
};

// Packs some columns of one source row into the bf16 layout.
template <class From>
static void pack_row(bf16* block, const From* from, int64_t stride, const Corner& at, int64_t row, Range columns) {
  const int64_t n = at.row + row;
  bf16* const outputs = block + n % kBlockN / 16 * kTile + n % 16 * 2;
  for (int64_t column = columns.begin; column < columns.end;) {
    const int64_t k = at.col + column, inside = k % kTileK;
    const int64_t count = std::min(kTileK - inside, columns.end - column);
    bf16* const tile = outputs + k / kTileK * 2 * kTile;
    bf16 values[kTileK];
    convert(values + inside, from + column * stride, stride, count);
    if (count == kTileK) {
      for (int pair = 0; pair < kTileK / 2; ++pair) std::memcpy(tile + pair * 32, values + pair * 2, 4);
    } else {
      for (int64_t i = inside; i < inside + count; ++i) tile[i / 2 * 32 + i % 2] = values[i];
    }
    column += count;
  }
}

// Packs some columns of one source row into the f32 layout.
template <class From>
static void pack_row(float* block, const From* from, int64_t stride, const Corner& at, int64_t row, Range columns) {
  float* const outputs = block + (at.row + row) % kBlockN;
  constexpr int64_t kPartUnits = 64;
  for (int64_t column = columns.begin; column < columns.end; column += kPartUnits) {
    const int64_t count = std::min(kPartUnits, columns.end - column);
    float values[kPartUnits];
    convert(values, from + column * stride, stride, count);
    for (int64_t i = 0; i < count; ++i) outputs[(at.col + column + i) * kBlockN] = values[i];
  }
}

// Packs 16 source rows of 32 columns, `stride` elements apart, into one bf16 tile: a transpose of pairs.
static inline void pack_tile(bf16* tile, const bf16* from, int64_t stride) {
#ifdef TR_AVX512
  Ints rows[16], pairs[16];
  for (int i = 0; i < 16; ++i) {
    rows[i] = load_ints(from + i * stride);
    _mm_prefetch(reinterpret_cast<const char*>(from + i * stride + 8 * kTileK), _MM_HINT_T0);
  }
  transpose(rows, pairs);
  // Non-temporal stores: the weight is not read before all of it is packed.
  for (int i = 0; i < 16; ++i) stream(tile + 32 * i, pairs[i]);
#else
  for (int output = 0; output < 16; ++output) {
    for (int pair = 0; pair < 16; ++pair) {
      std::memcpy(tile + pair * 32 + output * 2, from + output * stride + pair * 2, 4);
    }
  }
#endif
}

// Packs the tiles of one block of outputs that lie completely inside the rectangle. Returns the number of columns that
// they cover.
static int64_t pack_tiles(bf16* block, const Tensor& rows, int64_t first_row, Range columns, int64_t col, bool upper,
                          bool lower) {
  if (rows.stride[1] != 1 || (col + columns.begin) % kTileK != 0) return 0;
  if (reinterpret_cast<uintptr_t>(block) % 64 != 0) return 0;
  const int64_t whole = (columns.end - columns.begin) / kTileK * kTileK, stride = rows.stride[0];
  const bf16* const from = rows.as<const bf16>() + first_row * stride + columns.begin;
  bf16* const to = block + (col + columns.begin) / kTileK * 2 * kTile;
  for (int64_t k = 0; k < whole; k += kTileK) {
    bf16* const tiles = to + k / kTileK * 2 * kTile;
    if (upper) pack_tile(tiles, from + k, stride);
    if (lower) pack_tile(tiles + kTile, from + 16 * stride + k, stride);
  }
  return whole;
}

template <class To, class From>
static void pack_rectangle(const Tensor& data, const Tensor& rows, const Corner& at, Team& team) {
  // A task is one block of 32 outputs x 2048 columns, so that no two threads write the same cache line.
  constexpr int64_t kColumns = 2048;
  const int64_t count = rows.size[0], width = rows.size[1];
  const int64_t first_block = at.row / kBlockN, row_tasks = blocks(at.row + count, kBlockN) - first_block;
  const int64_t column_tasks = blocks(width, kColumns);
  const Range tasks = team.share(row_tasks * column_tasks);
  for (int64_t task = tasks.begin; task < tasks.end; ++task) {
    const int64_t block = (first_block + task / column_tasks) * kBlockN;
    const int64_t column = task % column_tasks * kColumns;
    const Range columns{column, std::min(column + kColumns, width)};
    const int64_t begin = std::max<int64_t>(block - at.row, 0), end = std::min(block + kBlockN - at.row, count);
    To* const to = data.row<To>(block / kBlockN);
    const bool upper = begin + at.row == block && end - begin >= 16,
               lower = end + at.row == block + kBlockN && end - begin >= 16;
    int64_t tiled = 0;
    if constexpr (std::is_same_v<To, bf16> && std::is_same_v<From, bf16>) {
      tiled = pack_tiles(to, rows, block - at.row, columns, at.col, upper, lower);
    }
    for (int64_t row = begin; row < end; ++row) {
      const bool in_tile = (row + at.row) % kBlockN < 16 ? upper : lower;
      const Range rest{columns.begin + (in_tile ? tiled : 0), columns.end};
      pack_row(to, rows.row<const From>(row), rows.stride[1], at, row, rest);
    }
  }
  end_streams();
}

// w_data: blocks of 32 outputs with any block stride; rows[r, c] with any strides
TR_ENTRY(pack, Team& team, const Tensor& w_data, const Tensor& rows, int64_t row, int64_t col) {
  for_float(w_data.dtype, [&](auto to) {
    for_source("pack", rows.dtype,
               [&](auto from) { pack_rectangle<decltype(to), decltype(from)>(w_data, rows, {row, col}, team); });
  });
}

}  // namespace tilerank::TR_RUNG
#endif
