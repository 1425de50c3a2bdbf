// Block-scaled weights: quantise_* quantises and packs rows, pack_* packs codes.
#ifndef TR_RUNG
#include "block_scaled/block_scaled.h"
#define TR_SOURCE "block_scaled/pack_block_scaled.cpp"
#include "simd/foreach_isa.h"
#else
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

// Returns the tile that holds the values of output n for inputs from k on.
static inline uint8_t* tile_of(const Tensor& values, int64_t n, int64_t k) {
  return values.row<uint8_t>(n / kBlockN) + (k / kTileK * 2 + n % kBlockN / kHalfN) * values.size[4];
}

// Writes the codes of output n for inputs from k on. Only the low four bits of a code count.
static void put_int4(const Tensor& values, int64_t n, int64_t k, const uint8_t* codes, int64_t count) {
  while (count > 0) {
    const int64_t first = k % 8, some = std::min(8 - first, count);
    uint8_t* const at = tile_of(values, n, k) + k % kTileK / 8 * 64 + n % kHalfN * 4;
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

// How a K-block is quantised: value = (code - zero) * scale.
struct Int4Params {
  float scale;
  int zero;
};

// Adds up in one order on every rung, so that all choose the same scales: kPartialSums sums of every 16th number, then
// their halves.
constexpr int64_t kPartialSums = 16;

class OrderedSum {
 public:
  OrderedSum() { std::fill_n(parts_, kVectors, zero()); }

  // Adds kLanes numbers to the sums of part `part`.
  void add(int64_t part, Vec x) { parts_[part] = parts_[part] + x; }

  float total() const {
    float sums[kPartialSums];
    for (int64_t part = 0; part < kVectors; ++part) store(sums + part * kLanes, parts_[part]);
    for (int64_t half = kPartialSums / 2; half > 0; half /= 2) {
      for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
    }
    return sums[0];
  }

  static constexpr int64_t kVectors = kPartialSums / kLanes;

 private:
  Vec parts_[kVectors];
};

// Searches the scale (and zero) of a group with the least sum of |x| (x - scale * l)^2, where l = the integer nearest
// to x * inverse in [low, high]. For given l the best scale is sum(|x| x l) / sum(|x| l^2), and the error is least
// where sum(|x| x l)^2 / sum(|x| l^2) is largest. Numbers are divided by the largest magnitude first, so that no power
// of them overflows.
class Int4Search {
 public:
  // values[count] finite, `largest` their largest magnitude, count a multiple of kPartialSums. memory: 3 * count
  // floats.
  Int4Search(const float* values, int64_t count, float largest, float* memory)
      : count_(count), x_(memory), magnitudes_(memory + count), squares_(memory + 2 * count) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const Vec x = load(values + i) / set(largest), magnitude = max(x, tilerank::TR_RUNG::zero() - x);
      store(x_ + i, x);
      store(magnitudes_ + i, magnitude);
      store(squares_ + i, magnitude * x);
    }
  }

  void attempt(float inverse, int zero) {
    const Vec low = set(static_cast<float>(-zero)), high = set(static_cast<float>(15 - zero));
    OrderedSum xl, ll;
    for (int64_t i = 0; i < count_; i += kPartialSums) {
      for (int64_t part = 0; part < OrderedSum::kVectors; ++part) {
        const int64_t at = i + part * kLanes;
        const Vec l = min(max(round_to_int(load(x_ + at) * set(inverse)), low), high);
        xl.add(part, load(squares_ + at) * l);
        ll.add(part, load(magnitudes_ + at) * (l * l));
      }
    }
    const float products = xl.total(), squares = ll.total();
    if (squares > 0 && products * products > gain_ * squares) {
      gain_ = products * products / squares;
      best = {products / squares, zero};
    }
  }

  Int4Params best{0.0f, 8};  // of the numbers divided by the largest

 private:
  const int64_t count_;
  float* const x_;
  float* const magnitudes_;
  float* const squares_;  // with the sign of x
  float gain_ = 0;
};

// The least and the largest of values and 0, and their largest magnitude, if all are finite.
struct Extremes {
  float least = 0, most = 0, largest = 0;
  bool finite = true;

  // count: a multiple of kPartialSums.
  Extremes(const float* values, int64_t count) {
    Vec low = zero(), high = zero(), wrong = zero();
    for (int64_t i = 0; i < count; i += kLanes) {
      const Vec x = load(values + i);
      low = max(low, zero() - x);
      high = max(high, x);
      wrong = wrong + (x - x);  // NaN, if x is infinite or NaN
    }
    finite = !std::isnan(sum(wrong));
    if (!finite) return;
    least = -max_of(low);
    most = max_of(high);
    largest = std::max(-least, most);
  }

  // Too small to divide by; then all become zeros.
  bool are_tiny() const { return largest < 1e-30f; }
};

// The scale and zero of values[count]. memory: 3 * count floats.
static Int4Params choose_int4(const float* values, int64_t count, bool zeros, float* memory) {
  const Extremes extremes(values, count);
  if (!extremes.finite) return {std::numeric_limits<float>::quiet_NaN(), 8};
  if (extremes.are_tiny()) return {0.0f, 8};
  const auto [least, most, largest, finite] = extremes;
  Int4Search search(values, count, largest, memory);
  const float first = least / largest, range = most / largest - first;
  for (int step = -3; step <= 5; ++step) {
    if (zeros) {
      const float extra = static_cast<float>(step) / 2, inverse = (15 + extra) / range;
      const float zero = -first * inverse - extra / 2;  // clips equally at both ends
      search.attempt(inverse, std::clamp(static_cast<int>(std::lrint(zero)), 0, 15));
    } else {
      const float inverse = 8 + static_cast<float>(step) / 4;  // the extreme value, 1 or -1, becomes -8
      search.attempt(-least > most ? inverse : -inverse, 8);
    }
  }
  return {search.best.scale * largest, search.best.zero};
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
TR_ENTRY(quantise_int4, Team& team, const OutputScaledWeight& w, const Tensor& source, int64_t row, int64_t col) {
  const Rectangle rectangle(source, row, col);
  const int64_t k_block_inputs = w.values.size[2] * kTileK,
                padded = blocks(k_block_inputs, kPartialSums) * kPartialSums;
  char* const memory = static_cast<char*>(team.scratch(static_cast<size_t>(padded) * (4 * sizeof(float) + 1)));
  float* const x = reinterpret_cast<float*>(memory);
  uint8_t* const codes = reinterpret_cast<uint8_t*>(x + 4 * padded);
  for_source("quantise", source.dtype, [&](auto type) {
    using T = decltype(type);
    rectangle.for_pieces(kBlockN, k_block_inputs, team, [&](Range rows, Range columns) {
      const int64_t k_block = (col + columns.begin) / k_block_inputs;
      for (int64_t r = rows.begin; r < rows.end; ++r) {
        read_group<T>(source, r, columns, x, padded);
        const Int4Params chosen = choose_int4(x, padded, static_cast<bool>(w.zeros), x + padded);
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

// Returns the factor, of 448 / (1 + i / 16), with the least squared error of values times factor as fp8.
// relative[count]: values by the largest magnitude; count a multiple of kPartialSums. Codes below 2^-6 count as if they
// had all bits.
static float choose_fp8(const float* relative, int64_t count) {
  float best = 448, least = std::numeric_limits<float>::infinity();
  for (int step = 0; step < 16; ++step) {
    const float wider = 1 + static_cast<float>(step) / 16, factor = 448 / wider;
    OrderedSum sum;
    for (int64_t i = 0; i < count; i += kPartialSums) {
      for (int64_t part = 0; part < OrderedSum::kVectors; ++part) {
        // Veltkamp: of 24 bits, the upper 4 remain.
        const Vec x = load(relative + i + part * kLanes) * set(factor), split = x * set(1048577.0f);
        const Vec error = (split - (split - x)) - x;
        sum.add(part, error * error);
      }
    }
    const float error = sum.total() * (wider * wider);
    if (error < least) least = error, best = factor;
  }
  return best;
}

// source[r, c] with any strides; col starts a K-block, which has a scale for each output.
TR_ENTRY(quantise_channel_fp8, Team& team, const OutputScaledWeight& w, const Tensor& source, int64_t row,
         int64_t col) {
  const Rectangle rectangle(source, row, col);
  const int64_t k_block_inputs = w.values.size[2] * kTileK;  // a multiple of kPartialSums
  char* const memory = static_cast<char*>(team.scratch(static_cast<size_t>(k_block_inputs) * (sizeof(float) + 1)));
  float* const x = reinterpret_cast<float*>(memory);
  uint8_t* const codes = reinterpret_cast<uint8_t*>(x + k_block_inputs);
  for_source("quantise", source.dtype, [&](auto type) {
    using T = decltype(type);
    rectangle.for_pieces(kBlockN, k_block_inputs, team, [&](Range rows, Range columns) {
      const int64_t count = columns.end - columns.begin, k_block = (col + columns.begin) / k_block_inputs;
      for (int64_t r = rows.begin; r < rows.end; ++r) {
        read_group<T>(source, r, columns, x, k_block_inputs);
        const int64_t n = row + r;
        float& scale = w.scales.row<float>(n / kBlockN)[k_block * kBlockN + n % kBlockN];
        const Extremes extremes(x, k_block_inputs);
        std::fill_n(codes, count, uint8_t{0});
        scale = extremes.finite ? 0 : std::numeric_limits<float>::quiet_NaN();
        if (extremes.finite && !extremes.are_tiny()) {
          for (int64_t i = 0; i < k_block_inputs; ++i) x[i] /= extremes.largest;
          const float factor = choose_fp8(x, k_block_inputs);
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

TR_ENTRY(pack_mxfp4, Team& team, const Tensor& w_values, const Tensor& codes, int64_t row, int64_t col) {
  pack_codes(w_values, codes, {codes, row, col}, 0, team, put_int4);
}

TR_ENTRY(pack_bytes, Team& team, const Tensor& w_values, const Tensor& codes, int64_t row, int64_t col) {
  pack_codes(w_values, codes, {codes, row, col}, 0, team, put_bytes);
}

}  // namespace tilerank::TR_RUNG
#endif
