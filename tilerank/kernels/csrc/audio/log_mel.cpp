// log_mel: frames of a mel spectrogram. The Fourier transform is a product, in doubles: a power of 1e-8 of the loudest
// one still counts, and the rounding of fp32 sums would reach it. Windowed samples n and n_fft - n share a cosine and,
// up to the sign, a sine. So do frequencies k and half - k, for which the sums over even and over odd samples are added
// or subtracted.
#ifndef TR_RUNG
#include "core/entry.h"
#include <cmath>

#define TR_SOURCE "audio/log_mel.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

// Returns the index of sample i of a clip of n that is reflected at its ends, as often as necessary.
static int64_t reflected(int64_t i, int64_t n) {
  if (n == 1) return 0;
  const int64_t period = 2 * (n - 1), r = ((i % period) + period) % period;
  return r < n ? r : period - r;
}

TR_ENTRY(log_mel, Team& team, const Tensor& samples, const Tensor& filters, int64_t first_frame, int64_t hop,
         const Tensor& window, const Tensor& cosines, const Tensor& sines, const Tensor& out) {
  const int64_t n = samples.size[0], bins = filters.size[0], half = bins - 1, mels = filters.size[1];
  const int64_t low = half / 2 + 1;  // frequencies that are computed, and with them the others
  double* const even =
      static_cast<double*>(team.scratch(sizeof(double) * static_cast<size_t>(3 * bins + 4 * low + mels)));
  double *const odd = even + bins, *const powers = odd + bins;
  double *const real = powers + bins, *const imaginary = real + 2 * low;  // over even samples, then over odd ones
  double* const sums = imaginary + 2 * low;
  const auto [first, last] = team.share(out.size[0]);
  for (int64_t frame = first; frame < last; ++frame) {
    const int64_t begin = (first_frame + frame) * hop - half;
    const auto sample = [&](int64_t i) {
      return window.as<double>()[i] * static_cast<double>(samples.as<float>()[reflected(begin + i, n)]);
    };
    even[0] = sample(0);
    even[half] = sample(half);
    odd[0] = odd[half] = 0.0;
    for (int64_t i = 1; i < half; ++i) {
      const double a = sample(i), b = sample(2 * half - i);
      even[i] = a + b;
      odd[i] = a - b;
    }
    for (int64_t k = 0; k < 2 * low; ++k) real[k] = imaginary[k] = 0.0;
    for (int64_t i = 0; i < bins; ++i) {
      const double a = even[i], b = odd[i];
      const double *const c = cosines.as<double>() + i * low, *const s = sines.as<double>() + i * low;
      double *const re = real + i % 2 * low, *const im = imaginary + i % 2 * low;
      for (int64_t k = 0; k < low; ++k) {
        re[k] += a * c[k];
        im[k] += b * s[k];
      }
    }
    for (int64_t k = 0; k < low; ++k) {
      const double a = real[k], b = real[low + k], c = imaginary[k], d = imaginary[low + k];
      powers[k] = (a + b) * (a + b) + (c + d) * (c + d);
      powers[half - k] = (a - b) * (a - b) + (c - d) * (c - d);
    }
    for (int64_t m = 0; m < mels; ++m) sums[m] = 0.0;
    for (int64_t k = 0; k < bins; ++k) {
      const double power = powers[k];
      const double* const weights = filters.as<double>() + k * mels;
      for (int64_t m = 0; m < mels; ++m) sums[m] += power * weights[m];
    }
    float* const to = out.as<float>() + frame * mels;
    for (int64_t m = 0; m < mels; ++m) {
      to[m] = static_cast<float>(std::log10(sums[m] > 1e-10 ? sums[m] : 1e-10));
    }
  }
}

}  // namespace tilerank::TR_RUNG
#endif
