// Quantises rows to MXFP4: codes of E2M1 and an exponent for every 32 inputs.
#ifndef TR_RUNG
#include "block_scaled/block_scaled.h"
#define TR_SOURCE "block_scaled/quantise_mxfp4.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

constexpr int64_t kMxBlock = 32;
constexpr int kPartialSums = 16;

static inline float power_of_two(int exponent) {  // biased, from 0 to 254
  const uint32_t bits = exponent == 0 ? 0x400000 : static_cast<uint32_t>(exponent) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return power;
}

// The codes of a block, and the sum of their squared errors in units of its scale, added up in one order on every rung:
// sums of every 16th number, then their halves.
struct MxCodes {
  uint8_t codes[kMxBlock];
  float error;

  MxCodes(const float* x, int exponent) {
    const float inverse = power_of_two(254 - exponent);
    float sums[kPartialSums] = {};
    for (int64_t i = 0; i < kMxBlock; ++i) {
      const float y = x[i] * inverse, magnitude = std::min(std::fabs(y), 6.0f);
      // The values up to 2, 4 and 6 are apart by 1/2, 1 and 2.
      const float per_unit = magnitude < 2 ? 2.0f : magnitude < 4 ? 1.0f : 0.5f;
      const float offset = magnitude < 2 ? 0.0f : magnitude < 4 ? 2.0f : 4.0f;
      const float steps = std::nearbyint(magnitude * per_unit), difference = std::fabs(y) - steps / per_unit;
      codes[i] = static_cast<uint8_t>(static_cast<int>(steps + offset) + (std::signbit(x[i]) ? 8 : 0));
      sums[i % kPartialSums] += difference * difference;
    }
    for (int half = kPartialSums / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
    }
    error = sums[0];
  }
};

// rows: floats; codes[r, k rounded up to blocks] and exponents[r, blocks]. Of the exponent by which the largest
// magnitude is from 4 to below 8, and the next, that with the smaller error is used; 255 with an infinity or NaN.
TR_ENTRY(quantise_mxfp4, Team& team, const Tensor& rows, const Tensor& codes, const Tensor& exponents) {
  const int64_t k = rows.size[1];
  const Range own = team.share(rows.size[0]);
  for (int64_t row = own.begin; row < own.end; ++row) {
    for (int64_t block = 0; block < exponents.size[1]; ++block) {
      const int64_t first = block * kMxBlock, count = std::min(kMxBlock, k - first);
      float x[kMxBlock] = {};
      std::copy_n(rows.row<const float>(row) + first, count, x);
      uint32_t largest = 0;  // as bits, which order like magnitudes
      for (const float value : x) {
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        largest = std::max(largest, bits & 0x7fffffff);
      }
      uint8_t* const to = codes.row<uint8_t>(row) + first;
      uint8_t& exponent = exponents.row<uint8_t>(row)[block];
      if (largest >= 0x7f800000) {
        std::fill_n(to, kMxBlock, uint8_t{0});
        exponent = 255;
        continue;
      }
      const int least = static_cast<int>(largest >> 23) - 2, low = std::max(least, 0), high = std::max(least + 1, 0);
      const MxCodes fine(x, low), coarse(x, high);
      const bool is_fine = fine.error <= 4 * coarse.error;
      std::copy_n(is_fine ? fine.codes : coarse.codes, kMxBlock, to);
      exponent = static_cast<uint8_t>(is_fine ? low : high);
    }
  }
}

}  // namespace tilerank::TR_RUNG
#endif
