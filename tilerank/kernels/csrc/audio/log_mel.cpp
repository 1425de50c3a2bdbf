// log_mel: frames of a mel spectrogram. The Fourier transform is a product, in doubles: a power of 1e-8 of the loudest
// one still counts, and the rounding of fp32 sums would reach it. Windowed samples n and n_fft - n share a cosine and,
// up to the sign, a sine.
#ifndef TR_RUNG
#include <cmath>

#include "core/kernel.h"
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

// tensors: samples [n] f32, window [2 * half] f64, cosines, sines [half + 1, half + 1] f64, filters [half + 1, mels]
// f64, out [frames, mels] f32; ints: first frame, hop
static void log_mel(const Args& args, Team& team) {
  const Tensor &samples = args.tensor(0), &filters = args.tensor(4), &out = args.tensor(5);
  const int64_t n = samples.size[0], bins = filters.size[0], half = bins - 1, mels = filters.size[1];
  const double* const window = args.tensor(1).as<double>();
  const double* const cosines = args.tensor(2).as<double>();
  const double* const sines = args.tensor(3).as<double>();
  double* const even = static_cast<double*>(team.scratch(sizeof(double) * static_cast<size_t>(4 * bins + mels)));
  double *const odd = even + bins, *const real = odd + bins, *const imaginary = real + bins;
  double* const sums = imaginary + bins;
  const auto [first, last] = team.share(out.size[0]);
  for (int64_t frame = first; frame < last; ++frame) {
    const int64_t begin = (args.integer(0) + frame) * args.integer(1) - half;
    const auto sample = [&](int64_t i) {
      return window[i] * static_cast<double>(samples.as<float>()[reflected(begin + i, n)]);
    };
    even[0] = sample(0);
    even[half] = sample(half);
    odd[0] = odd[half] = 0.0;
    for (int64_t i = 1; i < half; ++i) {
      const double a = sample(i), b = sample(2 * half - i);
      even[i] = a + b;
      odd[i] = a - b;
    }
    for (int64_t k = 0; k < bins; ++k) real[k] = imaginary[k] = 0.0;
    for (int64_t i = 0; i < bins; ++i) {
      const double a = even[i], b = odd[i];
      const double *const c = cosines + i * bins, *const s = sines + i * bins;
      for (int64_t k = 0; k < bins; ++k) {
        real[k] += a * c[k];
        imaginary[k] += b * s[k];
      }
    }
    for (int64_t m = 0; m < mels; ++m) sums[m] = 0.0;
    for (int64_t k = 0; k < bins; ++k) {
      const double power = real[k] * real[k] + imaginary[k] * imaginary[k];
      const double* const weights = filters.as<double>() + k * mels;
      for (int64_t m = 0; m < mels; ++m) sums[m] += power * weights[m];
    }
    float* const to = out.as<float>() + frame * mels;
    for (int64_t m = 0; m < mels; ++m) {
      to[m] = static_cast<float>(std::log10(sums[m] > 1e-10 ? sums[m] : 1e-10));
    }
  }
}
TR_KERNEL(log_mel)

}  // namespace tilerank::TR_RUNG
#endif
