// Block-scaled weights: quantise_* quantises and packs rows, pack_* packs codes.
#ifndef TR_RUNG
#include "block_scaled/block_scaled.h"
#define TR_SOURCE "block_scaled/pack_block_scaled.cpp"
#include "simd/foreach_isa.h"
#else
#include "block_scaled/scale_search-inl.h"
#include "linear/source_rows-inl.h"

namespace tilerank::TR_RUNG {

// The position of a rectangle of source rows in a weight. It is split into pieces of whole blocks of outputs x whole
// tiles of the destination, so that no two threads write the same byte.
struct Rectangle {
  int64_t row, col, rows, columns;

  Rectangle(const Tensor& source, int64_t row, int64_t col)
      : row(row), col(col), rows(source.size[0]), columns(source.size[1]) {}

  // Calls f(rows of the source, columns of the source) for this thread's pieces, split at multiples of `outputs` and
  // `inputs` of the weight.
  template <class F>
  void for_pieces(int64_t outputs, int64_t inputs, Team& team, const F& f) const {
    const int64_t first_n = row / outputs, first_k = col / inputs;
    const int64_t across = blocks(col + columns, inputs) - first_k;
    const Range own = team.share((blocks(row + rows, outputs) - first_n) * across);
    for (int64_t piece = own.begin; piece < own.end; ++piece) {
      const int64_t n = (first_n + piece / across) * outputs - row, k = (first_k + piece % across) * inputs - col;
      f(Range{std::max<int64_t>(n, 0), std::min(n + outputs, rows)},
        Range{std::max<int64_t>(k, 0), std::min(k + inputs, columns)});
    }
  }
};

// Returns the tile of so many inputs that holds the values of output n for inputs from k on.
static inline uint8_t* tile_of(const Tensor& values, int64_t n, int64_t k, int64_t inputs = kTileK) {
  return values.row<uint8_t>(n / kBlockN) + (k / inputs * 2 + n % kBlockN / kHalfN) * values.size[4];
}

// Writes the codes of output n for inputs from k on. Only the low four bits of a code count.
static void put_int4(const Tensor& values, int64_t n, int64_t k, const uint8_t* codes, int64_t count) {
  const int64_t inputs = values.size[4] * 2 / kHalfN;  // of a tile
  while (count > 0) {
    const int64_t first = k % 8, some = std::min(8 - first, count);
    uint8_t* const at = tile_of(values, n, k, inputs) + k % inputs / 8 * 64 + n % kHalfN * 4;
    uint32_t word = 0, mask = 0;
    for (int64_t i = 0; i < some; ++i) {
      const int64_t shift = (first + i) % 2 * 16 + (first + i) / 2 * 4;
      word |= (codes[i] & 15u) << shift;
      mask |= 15u << shift;
    }
    uint32_t old;
    std::memcpy(&old, at, 4);
    word |= old & ~mask;
    std::memcpy(at, &word, 4);
    codes += some;
    k += some;
    count -= some;
  }
}

// Writes the codes of output n for inputs from k on.
static void put_bytes(const Tensor& values, int64_t n, int64_t k, const uint8_t* codes, int64_t count) {
  const int64_t output = n % kHalfN / 4 * 16 + n % 4 * 2;
  const uint8_t* const end = codes + count;
  while (codes < end) {
    uint8_t* const tile = tile_of(values, n, k) + output;
    if (k % kTileK == 0 && end - codes >= kTileK) {
      for (int64_t i = 0; i < kTileK; i += 2) std::memcpy(tile + i / 4 * 64 + i % 4 / 2 * 8, codes + i, 2);
      codes += kTileK, k += kTileK;
      continue;
    }
    tile[k % kTileK / 4 * 64 + k % 4 / 2 * 8 + k % 2] = *codes++;
    ++k;
  }
}

// x[padded] = the columns of row `row` of a source, then zeros.
template <class T>
static void read_group(const Tensor& source, int64_t row, Range columns, float* x, int64_t padded) {
  const T* const from = source.row<const T>(row) + columns.begin * source.stride[1];
  const int64_t count = columns.end - columns.begin;
  for (int64_t i = 0; i < count; ++i) x[i] = as_float(from + i * source.stride[1]);
  std::fill(x + count, x + padded, 0.0f);
}

// source[r, c] with any strides; col starts a K-block. Inputs beyond the last column of its K-block become 0.
// importance[c]: weights of the errors of the columns; without it, errors weigh as much as the number.
TR_ENTRY(quantise_int4, Team& team, const OutputScaledWeight& w, const Tensor& source, int64_t row, int64_t col,
         const Tensor& importance) {
  const Rectangle rectangle(source, row, col);
  const int64_t k_block_inputs = w.values.size[2] * kTileK,
                padded = blocks(k_block_inputs, kPartialSums) * kPartialSums;
  char* const memory = static_cast<char*>(team.scratch(static_cast<size_t>(padded) * (5 * sizeof(float) + 1)));
  float* const x = reinterpret_cast<float*>(memory);
  float* const of_columns = x + 4 * padded;
  uint8_t* const codes = reinterpret_cast<uint8_t*>(x + 5 * padded);
  std::fill_n(of_columns, padded, 0.0f);
  for_source("quantise", source.dtype, [&](auto type) {
    using T = decltype(type);
    rectangle.for_pieces(kBlockN, k_block_inputs, team, [&](Range rows, Range columns) {
      const int64_t k_block = (col + columns.begin) / k_block_inputs;
      const int64_t count = columns.end - columns.begin;
      if (importance) std::copy_n(importance.as<const float>() + columns.begin, count, of_columns);
      for (int64_t r = rows.begin; r < rows.end; ++r) {
        read_group<T>(source, r, columns, x, padded);
        const Int4Params chosen =
            choose_int4(x, importance ? of_columns : nullptr, padded, static_cast<bool>(w.zeros), x + padded);
        const float most = 65504 * kGroupScaleUnit;
        const float wanted = std::isnan(chosen.scale) ? chosen.scale : std::clamp(chosen.scale, -most, most);
        const uint16_t stored = _cvtss_sh(wanted / kGroupScaleUnit, _MM_FROUND_TO_NEAREST_INT);
        const float scale = _cvtsh_ss(stored) * kGroupScaleUnit;
        const Vec inverse = set(scale == 0 || std::isnan(scale) ? 0 : 1 / scale);
        const Vec low = set(static_cast<float>(-chosen.zero)), high = set(static_cast<float>(15 - chosen.zero));
        float* const levels = x + padded;
        for (int64_t i = 0; i < padded; i += kLanes) {
          // not min or max of NaN: the instruction returns its second operand
          store(levels + i, min(max(round_to_int(load(x + i) * inverse), low), high));
        }
        for (int64_t i = 0; i < padded; ++i) {
          codes[i] = static_cast<uint8_t>(static_cast<int>(levels[i]) + chosen.zero - 8);
        }
        const int64_t n = row + r;
        put_int4(w.values, n, k_block * k_block_inputs, codes, k_block_inputs);
        const int64_t at = k_block * kBlockN + n % kBlockN;
        w.scales.row<f16>(n / kBlockN)[at] = f16{stored};
        if (w.zeros) w.zeros.row<int8_t>(n / kBlockN)[at] = static_cast<int8_t>(chosen.zero - 8);
      }
    });
  });
}

// Returns the nearest fp8 e4m3fn, ties to even. Magnitudes above 448 become 448; NaN stays NaN.
static inline uint8_t to_fp8(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
  // Below 2^-6 fp8 numbers are multiples of 2^-9, the unit in the last place of a float just above 2^14.
  float small;
  std::memcpy(&small, &magnitude, 4);
  small += 16384.0f;
  uint32_t subnormal;
  std::memcpy(&subnormal, &small, 4);
  const uint32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120u << 3);
  uint32_t code = magnitude < 0x3c800000 ? subnormal & 0xff : normal;
  code = magnitude >= 0x43e00000 ? 0x7e : code;
  code = magnitude > 0x7f800000 ? 0x7f : code;
  return static_cast<uint8_t>(sign | code);
}

// source[r, c] with any strides. The rectangle consists of whole scale blocks of block_n outputs x a K-block.
// scale = largest magnitude / 448.
TR_ENTRY(quantise_fp8, Team& team, const ByteCodesWeight& w, const Tensor& source, int64_t row, int64_t col,
         int64_t block_n) {
  const Rectangle rectangle(source, row, col);
  const int64_t k_block_inputs = w.values.size[2] * kTileK;
  const size_t size = static_cast<size_t>(block_n * k_block_inputs);
  float* const x = static_cast<float*>(team.scratch(size * sizeof(float) + static_cast<size_t>(k_block_inputs)));
  uint8_t* const codes = reinterpret_cast<uint8_t*>(x + size);
  for_source("quantise", source.dtype, [&](auto type) {
    using T = decltype(type);
    rectangle.for_pieces(block_n, k_block_inputs, team, [&](Range rows, Range columns) {
      const int64_t count = columns.end - columns.begin, k_block = (col + columns.begin) / k_block_inputs;
      uint32_t largest = 0;  // as bits, which order like magnitudes, NaN last
      for (int64_t r = rows.begin; r < rows.end; ++r) {
        const T* const from = source.row<const T>(r) + columns.begin * source.stride[1];
        float* const to = x + (r - rows.begin) * k_block_inputs;
        for (int64_t i = 0; i < count; ++i) {
          to[i] = as_float(from + i * source.stride[1]);
          uint32_t bits;
          std::memcpy(&bits, to + i, 4);
          largest = std::max(largest, bits & 0x7fffffff);
        }
      }
      float most;
      std::memcpy(&most, &largest, 4);
      // A block with an infinity or NaN becomes NaN; one too small to divide by becomes zero.
      const bool finite = largest < 0x7f800000;
      const float scale = !finite ? std::numeric_limits<float>::quiet_NaN() : most / 448;
      const float inverse = finite && most > 1e-35f ? 448 / most : 0;
      for (int64_t r = rows.begin; r < rows.end; ++r) {
        const int64_t n = row + r;
        const float* const from = x + (r - rows.begin) * k_block_inputs;
        for (int64_t i = 0; i < count; ++i) codes[i] = finite ? to_fp8(from[i] * inverse) : 0;
        put_bytes(w.values, n, col + columns.begin, codes, count);
        w.scales.row<float>(n / kBlockN)[k_block] = scale;
      }
    });
  });
}

// source[r, c] with any strides; col starts a K-block, which has a scale for each output. importance: as above.
TR_ENTRY(quantise_channel_fp8, Team& team, const OutputScaledWeight& w, const Tensor& source, int64_t row, int64_t col,
         const Tensor& importance) {
  const Rectangle rectangle(source, row, col);
  const int64_t k_block_inputs = w.values.size[2] * kTileK;  // a multiple of kPartialSums
  char* const memory = static_cast<char*>(team.scratch(static_cast<size_t>(k_block_inputs) * (2 * sizeof(float) + 1)));
  float* const x = reinterpret_cast<float*>(memory);
  float* const of_columns = x + k_block_inputs;
  uint8_t* const codes = reinterpret_cast<uint8_t*>(x + 2 * k_block_inputs);
  std::fill_n(of_columns, k_block_inputs, 1.0f);
  for_source("quantise", source.dtype, [&](auto type) {
    using T = decltype(type);
    rectangle.for_pieces(kBlockN, k_block_inputs, team, [&](Range rows, Range columns) {
      const int64_t count = columns.end - columns.begin, k_block = (col + columns.begin) / k_block_inputs;
      if (importance) std::copy_n(importance.as<const float>() + columns.begin, count, of_columns);
      for (int64_t r = rows.begin; r < rows.end; ++r) {
        read_group<T>(source, r, columns, x, k_block_inputs);
        const int64_t n = row + r;
        float& scale = w.scales.row<float>(n / kBlockN)[k_block * kBlockN + n % kBlockN];
        const Extremes extremes(x, k_block_inputs);
        std::fill_n(codes, count, uint8_t{0});
        scale = extremes.finite ? 0 : std::numeric_limits<float>::quiet_NaN();
        if (extremes.finite && !extremes.are_tiny()) {
          for (int64_t i = 0; i < k_block_inputs; ++i) x[i] /= extremes.largest;
          const float factor = choose_fp8(x, of_columns, k_block_inputs);
          for (int64_t i = 0; i < count; ++i) codes[i] = to_fp8(x[i] * factor);
          scale = extremes.largest / factor;
        }
        put_bytes(w.values, n, col + columns.begin, codes, count);
      }
    });
  });
}

// Calls put(values, output, input, codes, count) with the codes source[r, c] u8, any strides, less `zero`.
template <class Put>
static void pack_codes(const Tensor& values, const Tensor& source, const Rectangle& rectangle, uint8_t zero, Team& team,
                       const Put& put) {
  constexpr int64_t kColumns = 512;
  rectangle.for_pieces(kBlockN, kColumns, team, [&](Range rows, Range columns) {
    uint8_t codes[kColumns];
    const int64_t count = columns.end - columns.begin;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const uint8_t* const from = source.row<const uint8_t>(row) + columns.begin * source.stride[1];
      if (source.stride[1] == 1) {
        for (int64_t i = 0; i < count; ++i) codes[i] = static_cast<uint8_t>(from[i] - zero);
      } else {
        for (int64_t i = 0; i < count; ++i) codes[i] = static_cast<uint8_t>(from[i * source.stride[1]] - zero);
      }
      put(values, rectangle.row + row, rectangle.col + columns.begin, codes, count);
    }
  });
}

TR_ENTRY(pack_int4, Team& team, const Tensor& w_values, const Tensor& codes, int64_t row, int64_t col) {
  pack_codes(w_values, codes, {codes, row, col}, 8, team, put_int4);
}

TR_ENTRY(pack_e2m1, Team& team, const Tensor& w_values, const Tensor& codes, int64_t row, int64_t col) {
  pack_codes(w_values, codes, {codes, row, col}, 0, team, put_int4);
}

TR_ENTRY(pack_bytes, Team& team, const Tensor& w_values, const Tensor& codes, int64_t row, int64_t col) {
  pack_codes(w_values, codes, {codes, row, col}, 0, team, put_bytes);
}

}  // namespace tilerank::TR_RUNG
#endif
