#include "pictures/resampling.h"

#include <algorithm>
#include <cmath>

namespace tilerank {

namespace {

double bilinear_kernel(double x) { return std::max(1.0 - std::abs(x), 0.0); }

double bicubic_kernel(double x) {
  constexpr double a = -0.5;
  x = std::abs(x);
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0;
  if (x < 2.0) return ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a;
  return 0.0;
}

}  // namespace

Resampling::Resampling(int64_t from, int64_t to, bool bicubic) : is_identity(from == to) {
  const double scale = static_cast<double>(from) / static_cast<double>(to), widened = std::max(scale, 1.0);
  const double support = (bicubic ? 2.0 : 1.0) * widened, narrowed = 1.0 / widened;
  const auto center = [&](int64_t i) { return scale * (static_cast<double>(i) + 0.5); };
  const auto count = [&](int64_t i) {
    const int64_t end = std::min(static_cast<int64_t>(center(i) + support + 0.5), from);
    return end - all_first_[static_cast<size_t>(i)];
  };
  for (int64_t i = 0; i < to; ++i) {
    all_first_.push_back(std::max<int64_t>(static_cast<int64_t>(center(i) - support + 0.5), 0));
    taps = std::max(taps, count(i));
  }
  taps = (taps + 3) / 4 * 4;

  std::vector<double> exact(static_cast<size_t>(to * taps), 0.0);
  double largest = 0.0;
  for (int64_t i = 0; i < to; ++i) {
    double* const row = exact.data() + i * taps;
    double total = 0.0;
    for (int64_t j = 0; j < count(i); ++j) {
      const double pixel = static_cast<double>(j + all_first_[static_cast<size_t>(i)]);
      const double x = (pixel - center(i) + 0.5) * narrowed;
      total += row[j] = bicubic ? bicubic_kernel(x) : bilinear_kernel(x);
    }
    for (int64_t j = 0; j < count(i); ++j) largest = std::max(largest, row[j] /= total);
  }
  while (precision < 22 && static_cast<int>(0.5 + largest * (1 << (precision + 1))) < (1 << 15)) ++precision;
  for (const double weight : exact) {
    const double scaled = weight * (1 << precision);
    all_weights_.push_back(static_cast<int16_t>(scaled < 0 ? scaled - 0.5 : scaled + 0.5));
  }
  first_ = all_first_.data();
  weights_ = all_weights_.data();
}

Resampling::~Resampling() = default;

}  // namespace tilerank
