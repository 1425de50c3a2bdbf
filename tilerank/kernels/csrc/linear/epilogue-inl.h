// The arguments and the epilogue of every linear kernel, compiled once per rung (no include guard):
// out = activation(sums + bias) in fp32, rounded once.
//
// A result is 32 columns of `out`. It needs the sums of `parts` consecutive blocks of the weight: two with silu_mul
// (gate and up), otherwise one.

namespace tilerank::TR_RUNG {

// The arguments of a linear kernel beside the weight. scratch: memory that all threads share, as much as
// `Weight.scratch` of the format says, or none.
struct LinearArgs {
  const Tensor &x, &bias;
  int64_t activation;
  const Tensor &out, &scratch;
};

// Numbered as in linear.py.
enum class Activation : int64_t { none, silu_mul, gelu, gelu_tanh };

// x (1 + erf(x / sqrt 2)) / 2. erf is the rational minimax approximation of Eigen and XLA, accurate to a few units in
// the last place of 1; its argument is clamped to [-4, 4].
static inline Vec gelu(Vec x) {
  const Vec y = min(set(4.0f), max(set(-4.0f), x * set(0.70710678118654752f)));
  const Vec y2 = y * y;
  Vec p = set(-2.72614225801306e-10f);
  for (const float c : {2.77068142495902e-08f, -2.10102402082508e-06f, -5.69250639462346e-05f, -7.34990630326855e-04f,
                        -2.95459980854025e-03f, -1.60960333262415e-02f}) {
    p = fma(p, y2, set(c));
  }
  Vec q = set(-1.45660718464996e-05f);
  for (const float c :
       {-2.13374055278905e-04f, -1.68282697438203e-03f, -7.37332916720468e-03f, -1.42647390514189e-02f}) {
    q = fma(q, y2, set(c));
  }
  return set(0.5f) * x * (set(1.0f) + y * p / q);
}

// x (1 + tanh u) / 2 = x / (1 + exp(-2u)) with u = sqrt(2 / pi) (x + 0.044715 x^3)
static inline Vec gelu_tanh(Vec x) {
  const Vec u2 = set(1.5957691216057308f) * x * fma(x * x, set(0.044715f), set(1.0f));
  return x / (set(1.0f) + exp(zero() - u2));
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
        parts(activation == Activation::silu_mul ? 2 : 1),
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
    if (activation == Activation::silu_mul) {
      if (bias) {
        const int64_t gate = column / kBlockN * 2 * kBlockN + column % kBlockN;
        sums = sums + load_some(bias, gate, kLanes);
        up = up + load_some(bias, gate + kBlockN, kLanes);
      }
      return silu(sums) * up;
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
