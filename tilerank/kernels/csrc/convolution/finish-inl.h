// What follows the sums of a convolution, compiled once per rung (no include guard):
// y = residual + scale * (sums + bias) and its snake, y + magnitude * sin(frequency * y)^2, in fp32, each rounded once.

namespace tilerank::TR_RUNG {

// sin(x)^2 within 2e-7 where |x| < 1e5: x = n pi + r with |r| <= pi / 2 and pi in two pieces, then the polynomial in r
// that interpolates the sine at Chebyshev nodes.
static inline Vec squared_sine(Vec x) {
  const Vec n = round_to_int(x * set(0.318309886183790672f));
  Vec r = fma(n, set(-3.14159274101257324f), x);
  r = fma(n, set(8.74227765734758578e-8f), r);
  const Vec r2 = r * r;
  Vec p = set(-2.408028410e-08f);
  p = fma(p, r2, set(2.753646938e-06f));
  p = fma(p, r2, set(-1.984108667e-04f));
  p = fma(p, r2, set(8.333332769e-03f));
  p = fma(p, r2, set(-1.666666666e-01f));
  const Vec sine = fma(p * r2, r, r);
  return sine * sine;
}

class Finish {
 public:
  // Any of the arguments may be none, but not both `out` and `activated`.
  Finish(const Tensor& bias, const Tensor& scale, const Tensor& residual, const Tensor& out, const Tensor& frequency,
         const Tensor& magnitude, const Tensor& activated)
      : columns((out ? out : activated).size[1]),
        bias_(bias),
        scale_(scale),
        residual_(residual),
        out_(out),
        frequency_(frequency),
        magnitude_(magnitude),
        activated_(activated) {}

  // Finishes `count` rows of a block of 32 columns from their sums, float[count][32]. Columns beyond the last are
  // dropped. step: from a vector of the first row to the next one.
  void write(int64_t row, int64_t count, int64_t column, const float* sums, int64_t step = kLanes) const {
    for (int64_t v = 0; v < kBlockN / kLanes && column + v * kLanes < columns; ++v) {
      const int64_t first = column + v * kLanes, lanes = std::min<int64_t>(kLanes, columns - first);
      const Vec bias = bias_ ? load_some(bias_, first, lanes) : zero();
      const Vec scale = scale_ ? load(scale_.as<const float>() + first, lanes) : set(1.0f);
      const Vec frequency = activated_ ? load(frequency_.as<const float>() + first, lanes) : zero();
      const Vec magnitude = activated_ ? load(magnitude_.as<const float>() + first, lanes) : zero();
      for (int64_t r = 0; r < count; ++r) {
        Vec y = (load(sums + r * kBlockN + v * step) + bias) * scale;
        if (residual_) y = y + load_some(residual_, (row + r) * residual_.stride[0] + first, lanes);
        if (activated_) {
          store_some(activated_, row + r, first, lanes, fma(magnitude, squared_sine(y * frequency), y));
        }
        if (out_) store_some(out_, row + r, first, lanes, y);
      }
    }
  }

  const int64_t columns;

 private:
  static Vec load_some(const Tensor& from, int64_t i, int64_t count) {
    return from.dtype == DType::f32 ? load(from.as<const float>() + i, count) : load(from.as<const bf16>() + i, count);
  }
  static void store_some(const Tensor& to, int64_t row, int64_t column, int64_t count, Vec value) {
    if (to.dtype == DType::f32) {
      store(to.row<float>(row) + column, value, count);
    } else {
      store(to.row<bf16>(row) + column, value, count);
    }
  }

  const Tensor &bias_, &scale_, &residual_, &out_, &frequency_, &magnitude_, &activated_;
};

}  // namespace tilerank::TR_RUNG
