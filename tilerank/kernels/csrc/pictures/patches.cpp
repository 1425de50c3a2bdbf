// patches: frames of RGB bytes, resized, normalised and cut into patches. A unit of work is a row of patches of a
// frame: its input rows are resized horizontally into a window, the window vertically into a strip of as many rows as a
// patch has, and the strip is cut. Bytes of a pixel stay together (RGBRGB...) until it is cut.
#ifndef TR_RUNG
#include "core/entry.h"
#include "pictures/resampling.h"
#define TR_SOURCE "pictures/patches.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

constexpr int64_t kSlack = 64;  // bytes behind a row of pixels that may be read or written

// Returns the channels of four pixels as words, by pairs of pixels: r0 r1 g0 g1 b0 b1 0 0, r2 r3 g2 g3 b2 b3 0 0.
static inline __m256i load_four_pixels(const uint8_t* p) {
  const __m256i turns = _mm256_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1,  //
                                         6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1);
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), turns);
}

static void resize_horizontally(const uint8_t* row, const Resampling& x, uint8_t* out, int64_t width) {
  const __m256i in_pairs = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
  const __m128i half = _mm_set1_epi32(1 << (x.precision - 1)), shift = _mm_cvtsi32_si128(x.precision);
  const int64_t taps = x.taps;
  const int16_t* weights = x.weights();
  const int64_t* const first = x.first();
  for (int64_t i = 0; i < width; ++i, weights += taps) {
    const uint8_t* const from = row + 3 * first[i];
    __m256i sums = _mm256_setzero_si256();
    for (int64_t j = 0; j < taps; j += 4) {
      int64_t four;
      std::memcpy(&four, weights + j, sizeof four);
      const __m256i pairs = _mm256_permutevar8x32_epi32(_mm256_set1_epi64x(four), in_pairs);
      sums = _mm256_add_epi32(sums, _mm256_madd_epi16(load_four_pixels(from + 3 * j), pairs));
    }
    const __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    const __m128i words = _mm_packs_epi32(_mm_sra_epi32(_mm_add_epi32(sum, half), shift), _mm_setzero_si128());
    const int pixel = _mm_cvtsi128_si32(_mm_packus_epi16(words, words));
    std::memcpy(out + 3 * i, &pixel, sizeof pixel);  // the fourth byte belongs to the next pixel, or to the slack
  }
}

// rows: taps of them; weights: as many.
static void resize_vertically(const uint8_t* const* rows, const int16_t* weights, int64_t taps, int precision,
                              uint8_t* out, int64_t bytes) {
  const __m256i half = _mm256_set1_epi32(1 << (precision - 1));
  const __m128i shift = _mm_cvtsi32_si128(precision);
  for (int64_t i = 0; i < bytes; i += 16) {
    __m256i low = half, high = half;
    for (int64_t j = 0; j < taps; j += 2) {
      int two;
      std::memcpy(&two, weights + j, sizeof two);
      const __m256i pair = _mm256_set1_epi32(two);
      const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[j] + i));
      const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[j + 1] + i));
      low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b)), pair));
      high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b)), pair));
    }
    const __m256i mixed = _mm256_packs_epi32(_mm256_sra_epi32(low, shift), _mm256_sra_epi32(high, shift));
    const __m256i words = _mm256_permute4x64_epi64(mixed, 0xd8);
    const __m128i sixteen = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), sixteen);
  }
}

// The rows of one frame after another, resized horizontally. It holds the last `count` rows that were asked for.
class RowWindow {
 public:
  RowWindow(const Tensor& frames, const Resampling& x, int64_t width, int64_t count, int64_t pitch, uint8_t* memory)
      : frames_(frames),
        x_(x),
        width_(width),
        count_(count),
        pitch_(pitch),
        rows_(memory),
        line_(memory + count * pitch) {}
  static int64_t bytes(const Tensor& frames, const Resampling& x, int64_t count, int64_t pitch) {
    return count * pitch + 3 * (frames.size[2] + x.taps) + kSlack;
  }

  // Resizes the rows from `first` to `end` that are not there. For one frame `first` only grows.
  void go_to(int64_t frame, int64_t first, int64_t end) {
    if (frame != frame_) next_ = 0;
    frame_ = frame;
    for (next_ = std::max(next_, first); next_ < end; ++next_) {
      const uint8_t* const pixels = frames_.as<uint8_t>() + frame * frames_.stride[0] + next_ * frames_.stride[1];
      if (x_.is_identity) {
        copy(pixels, rows_ + next_ % count_ * pitch_);
      } else {
        copy(pixels, line_);
        resize_horizontally(line_, x_, rows_ + next_ % count_ * pitch_, width_);
      }
    }
  }
  const uint8_t* row(int64_t index) const { return rows_ + index % count_ * pitch_; }

 private:
  void copy(const uint8_t* pixels, uint8_t* to) const {
    const int64_t count = frames_.size[2], stride = frames_.stride[2];
    if (stride == 3) {
      std::memcpy(to, pixels, static_cast<size_t>(3 * count));
    } else {
      for (int64_t i = 0; i < count; ++i) std::memcpy(to + 3 * i, pixels + i * stride, 3);
    }
  }

  const Tensor& frames_;
  const Resampling& x_;
  const int64_t width_, count_, pitch_;
  uint8_t *const rows_, *const line_;
  int64_t frame_ = -1, next_ = 0;
};

// 16 pixels as their channels, 16 bytes each.
static inline void split_channels(const uint8_t* pixels, uint8_t (*channels)[16]) {
  constexpr char kNone = -1;
  alignas(16) static constexpr char kTurns[3][3][16] = {
      {{0, 3, 6, 9, 12, 15, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone},
       {kNone, kNone, kNone, kNone, kNone, kNone, 2, 5, 8, 11, 14, kNone, kNone, kNone, kNone, kNone},
       {kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, 1, 4, 7, 10, 13}},
      {{1, 4, 7, 10, 13, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone},
       {kNone, kNone, kNone, kNone, kNone, 0, 3, 6, 9, 12, 15, kNone, kNone, kNone, kNone, kNone},
       {kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, 2, 5, 8, 11, 14}},
      {{2, 5, 8, 11, 14, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone},
       {kNone, kNone, kNone, kNone, kNone, 1, 4, 7, 10, 13, kNone, kNone, kNone, kNone, kNone, kNone},
       {kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone, 0, 3, 6, 9, 12, 15}}};
  const auto* const parts = reinterpret_cast<const __m128i*>(pixels);
  for (int c = 0; c < 3; ++c) {
    __m128i channel = _mm_setzero_si128();
    for (int part = 0; part < 3; ++part) {
      const __m128i turns = _mm_load_si128(reinterpret_cast<const __m128i*>(kTurns[c][part]));
      channel = _mm_or_si128(channel, _mm_shuffle_epi8(_mm_loadu_si128(parts + part), turns));
    }
    _mm_store_si128(reinterpret_cast<__m128i*>(channels[c]), channel);
  }
}

static inline Vec load_bytes(const uint8_t* p) {
#ifdef TR_AVX512
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))))};
#else
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
#endif
}

// A band of rows of patches of every frame.
struct PatchShape {
  int64_t rows, columns, patch, merge, temporal;

  // Returns the place of a patch in its band, without regard to time: by block, then by row and column in the block.
  int64_t index(int64_t row, int64_t column) const {
    const int64_t block = row / merge * (columns / merge) + column / merge;
    return (block * merge + row % merge) * merge + column % merge;
  }
};

// Normalises a strip of a frame and cuts it into a row of patches.
// first_slot, end_slot: the frames of the patch that it becomes, more than one if the frame is repeated.
template <class T>
static void cut_strip(const uint8_t* strip, int64_t pitch, const PatchShape& shape, int64_t t, int64_t row,
                      int64_t first_slot, int64_t end_slot, const float* means, const float* deviations, T* out) {
  const int64_t patch = shape.patch, area = patch * patch;
  alignas(64) uint8_t channels[3][16];
  for (int64_t column = 0; column < shape.columns; ++column) {
    const int64_t index = t * shape.rows * shape.columns + shape.index(row, column);
    T* const values = out + index * 3 * shape.temporal * area;
    for (int64_t y = 0; y < patch; ++y) {
      for (int64_t x = 0; x < patch; x += 16) {
        split_channels(strip + y * pitch + 3 * (column * patch + x), channels);
        for (int64_t c = 0; c < 3; ++c) {
          const Vec mean = set(means[c]), deviation = set(deviations[c]);
          T* const to = values + c * shape.temporal * area + y * patch + x;
          for_lanes(std::min<int64_t>(16, patch - x), [&](int64_t i, auto lanes) {
            const Vec normed = (load_bytes(channels[c] + i) - mean) / deviation;
            for (int64_t slot = first_slot; slot < end_slot; ++slot) lanes.store(to + slot * area + i, normed);
          });
        }
      }
    }
  }
}

// rows: of patches in the band, from first_row on. height, width: after resizing, at most those of the patches.
TR_ENTRY(patches, Team& team, const Tensor& frames, int64_t rows, int64_t columns, int64_t patch, int64_t merge,
         int64_t temporal, bool bicubic, int64_t height, int64_t width, int64_t first_row, float red_mean,
         float green_mean, float blue_mean, float red_std, float green_std, float blue_std, const Tensor& out) {
  const PatchShape shape = {rows, columns, patch, merge, temporal};
  const int64_t n = frames.size[0], full_width = shape.columns * shape.patch;
  const Resampling x(frames.size[2], width, bicubic), y(frames.size[1], height, bicubic);
  const float means[] = {255.0f * red_mean, 255.0f * green_mean, 255.0f * blue_mean};
  const float deviations[] = {255.0f * red_std, 255.0f * green_std, 255.0f * blue_std};

  const int64_t pitch = (3 * full_width + 2 * kSlack - 1) / kSlack * kSlack;
  const int64_t strip_bytes = shape.patch * pitch;
  const int64_t pointer_bytes = y.taps * static_cast<int64_t>(sizeof(uint8_t*));
  const int64_t window_bytes = RowWindow::bytes(frames, x, y.taps, pitch);
  auto* const memory =
      static_cast<uint8_t*>(team.scratch(static_cast<size_t>(pointer_bytes + strip_bytes + window_bytes)));
  auto** const taken = reinterpret_cast<const uint8_t**>(memory);
  uint8_t* const strip = memory + pointer_bytes;
  RowWindow window(frames, x, width, y.taps, pitch, strip + strip_bytes);

  const auto [first, last] = team.share(n * shape.rows);
  for (int64_t item = first; item < last; ++item) {
    const int64_t frame = item / shape.rows, row = item % shape.rows;
    for (int64_t i = 0; i < shape.patch; ++i) {
      const int64_t at = (first_row + row) * shape.patch + i;
      uint8_t* const resized = strip + i * pitch;
      if (at >= height) {
        std::memset(resized, 0, static_cast<size_t>(3 * full_width));
        continue;
      }
      if (y.is_identity) {
        window.go_to(frame, at, at + 1);
        std::memcpy(resized, window.row(at), static_cast<size_t>(3 * width));
      } else {
        const int64_t begin = y.first()[at];
        window.go_to(frame, begin, std::min(begin + y.taps, frames.size[1]));
        for (int64_t j = 0; j < y.taps; ++j) taken[j] = window.row(begin + j);
        resize_vertically(taken, y.weights() + at * y.taps, y.taps, y.precision, resized, 3 * width);
      }
      std::memset(resized + 3 * width, 0, static_cast<size_t>(3 * (full_width - width)));
    }
    const int64_t slot = frame % shape.temporal, end_slot = frame == n - 1 ? shape.temporal : slot + 1;
    for_float(out.dtype, [&](auto type) {
      cut_strip(strip, pitch, shape, frame / shape.temporal, row, slot, end_slot, means, deviations,
                out.as<decltype(type)>());
    });
  }
}

}  // namespace tilerank::TR_RUNG
#endif
