// The weights with which one axis of a picture is resized.
#pragma once
#include <cstdint>
#include <vector>

namespace tilerank {

// out[i] = clamp((sum_j weights()[i * taps + j] * in[first()[i] + j] + half) >> precision, 0, 255), 0 <= j < taps, with
// half = 2^(precision - 1). These are the weights of torch and Pillow for uint8 with antialiasing: the kernel, widened
// when the picture shrinks, sampled at the pixels within its support, normalised, rounded to int16 with as many bits as
// the largest one allows. Beyond the last pixel weights are zero.
class Resampling {
 public:
  // bicubic with a = -0.5, or bilinear
  Resampling(int64_t from, int64_t to, bool bicubic);
  ~Resampling();  // not inline: it would be compiled for a rung
  Resampling(const Resampling&) = delete;

  const int64_t* first() const { return first_; }
  const int16_t* weights() const { return weights_; }

  const bool is_identity;
  int64_t taps = 0;  // a multiple of 4
  int precision = 0;

 private:
  std::vector<int64_t> all_first_;
  std::vector<int16_t> all_weights_;
  const int64_t* first_ = nullptr;
  const int16_t* weights_ = nullptr;
};

}  // namespace tilerank
