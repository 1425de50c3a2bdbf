// The end of a product for the rung that includes this file (no include guard): fp32 sums plus bias, rounded once.

namespace tilerank::TR_RUNG {

struct Epilogue {
  const Tensor& bias;  // [n] or none
  const Tensor& out;   // [m, n]
  const int64_t n;

  Epilogue(const Tensor& bias, const Tensor& out) : bias(bias), out(out), n(out.size[1]) {}

  // sums of row `row`, columns `column`... ; what lies beyond the last column is dropped
  void write(Vec sums, int64_t row, int64_t column) const {
    const int64_t count = std::min<int64_t>(kLanes, n - column);
    if (count <= 0) return;
    if (bias) {
      sums = sums + (bias.dtype == DType::f32 ? load(bias.as<const float>() + column, count)
                                              : load(bias.as<const bf16>() + column, count));
    }
    if (out.dtype == DType::f32) {
      store(out.row<float>(row) + column, sums, count);
    } else {
      store(out.row<bf16>(row) + column, sums, count);
    }
  }

  template <class F>
  void prefetch(Range rows, int64_t column, F&& prefetch_write) const {
    const int64_t element = out.dtype == DType::f32 ? 4 : 2;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      prefetch_write(out.as<const char>() + (row * out.stride[0] + column) * element);
    }
  }
};

}  // namespace tilerank::TR_RUNG
