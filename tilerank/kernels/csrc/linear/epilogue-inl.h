// The arguments and the epilogue of every linear kernel, compiled once per rung (no include guard):
// out = activation(sums + bias) in fp32, rounded once.
//
// A result is 32 columns of `out`. It needs the sums of `parts` consecutive blocks of the weight: two (gate and up)
// with a gated activation, otherwise one.

#include "simd/activations-inl.h"

namespace tilerank::TR_RUNG {

// The arguments of a linear kernel beside the weight. scratch: memory that all threads share, as much as
// `Weight.scratch` of the format says, or none.
struct LinearArgs {
  const Tensor &x, &bias;
  int64_t activation;
  const Tensor &out, &scratch;
};

// Numbered as in linear.py.
enum class Activation : int64_t { none, silu_mul, gelu, gelu_tanh, gelu_tanh_mul };

static constexpr bool is_gated(Activation activation) {
  return activation == Activation::silu_mul || activation == Activation::gelu_tanh_mul;
}

// Writes bare sums or their silu_mul, in bf16 and whole blocks, with non-temporal stores. It takes few instructions:
// with more of them the reorder buffer would not reach the loads of the next tiles.
template <int kParts>
struct PlainStream {
  bf16* out;
  int64_t stride;

  void write(int64_t row, int64_t result, Vec32 sums, const Vec32& up) const {
    for (int v = 0; kParts == 2 && v < kBlockN / kLanes; ++v) sums[v] = silu(sums[v]) * up[v];
    stream(out + row * stride + result * kBlockN, sums);
  }
};

struct Epilogue {
  const Tensor &bias, &out;
  const Activation activation;
  const int64_t parts, results;

  explicit Epilogue(const LinearArgs& args)
      : bias(args.bias),
        out(args.out),
        activation(static_cast<Activation>(args.activation)),
        parts(is_gated(activation) ? 2 : 1),
        results((out.size[1] + kBlockN - 1) / kBlockN),
        streams_(kLanes == 16 && out.size[0] * row_bytes() >= kStreamBytes && row_bytes() % 64 == 0) {}
  ~Epilogue() {
    if (streams_) end_streams();
  }
  Epilogue(const Epilogue&) = delete;
  Epilogue& operator=(const Epilogue&) = delete;

  // Writes one row of a result from its sums; with two parts `sums` is the gate and `up` the up projection, otherwise
  // `up` is not used. Columns beyond the last are dropped.
  void write(int64_t row, int64_t result, const Vec32& sums, const Vec32& up) const {
    const int64_t first = result * kBlockN;
    if (kLanes == 16 && streams_ && first + kBlockN <= out.size[1]) return write_line(row, first, sums, up);
    for (int v = 0; v < kBlockN / kLanes; ++v) {
      const int64_t column = first + v * kLanes;
      const int64_t count = std::min<int64_t>(kLanes, out.size[1] - column);
      if (count > 0) write_some(row, column, count, activated(sums[v], up[v], column));
    }
  }

  // Calls f(to) with the destination of results of kParts blocks: this, or a PlainStream that does the same.
  template <int kParts, class F>
  void with_destination(const F& f) const {
    const bool plain = streams_ && !bias && out.dtype == DType::bf16 && out.size[1] % kBlockN == 0;
    if (plain && (activation == Activation::none || activation == Activation::silu_mul)) {
      f(PlainStream<kParts>{out.as<bf16>(), out.stride[0]});
    } else {
      f(*this);
    }
  }

  template <class F>
  void prefetch(Range rows, int64_t result, F&& prefetch_write) const {
    if (streams_) return;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      prefetch_write(out.as<const char>() + (row * out.stride[0] + result * kBlockN) * bytes_of(out.dtype));
    }
  }

 private:
  static Vec load_some(const Tensor& from, int64_t i, int64_t count) {
    return from.dtype == DType::f32 ? load(from.as<const float>() + i, count) : load(from.as<const bf16>() + i, count);
  }

  int64_t row_bytes() const { return out.size[1] * bytes_of(out.dtype); }

  Vec activated(Vec sums, Vec up, int64_t column) const {
    if (is_gated(activation)) {
      if (bias) {
        const int64_t gate = column / kBlockN * 2 * kBlockN + column % kBlockN;
        sums = sums + load_some(bias, gate, kLanes);
        up = up + load_some(bias, gate + kBlockN, kLanes);
      }
      return (activation == Activation::silu_mul ? silu(sums) : gelu_tanh(sums)) * up;
    }
    if (bias) sums = sums + load_some(bias, column, std::min<int64_t>(kLanes, bias.size[0] - column));
    if (activation == Activation::gelu) return gelu(sums);
    if (activation == Activation::gelu_tanh) return gelu_tanh(sums);
    return sums;
  }

  void write_some(int64_t row, int64_t column, int64_t count, Vec value) const {
    if (out.dtype == DType::f32) {
      store(out.row<float>(row) + column, value, count);
    } else {
      store(out.row<bf16>(row) + column, value, count);
    }
  }

  // Writes whole cache lines with non-temporal stores. Ordinary stores would first read each line, which interrupts the
  // stream of the weight, and rows of `out` that are a power of two apart would evict each other.
  void write_line(int64_t row, int64_t column, Vec32 sums, const Vec32& up) const {
    for (int v = 0; v < kBlockN / kLanes; ++v) sums[v] = activated(sums[v], up[v], column + v * kLanes);
    if (out.dtype == DType::f32) {
      stream(out.row<float>(row) + column, sums);
    } else {
      stream(out.row<bf16>(row) + column, sums);
    }
  }

  static constexpr int64_t kStreamBytes = 16 << 10;  // smaller outputs stay in the cache
  const bool streams_;
};

}  // namespace tilerank::TR_RUNG
