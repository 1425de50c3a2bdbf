// The entries of the linear kernels of a format, compiled once per rung (no include guard; include after
// epilogue-inl.h): linear, and head_linear, which multiplies every head with a weight of its own.

namespace tilerank::TR_RUNG {

// to[m, k] = x * scales, rounded.
static void scale_rows(const Tensor& x, const float* scales, bf16* to) {
  for (int64_t row = 0; row < x.size[0]; ++row, to += x.size[1]) {
    for_lanes(x.size[1], [&](int64_t i, auto lanes) {
      lanes.store(to + i, lanes.load(x.row<const bf16>(row) + i) * lanes.load(scales + i));
    });
  }
}

// out[m, heads, n] = x[m, heads, k], times x_scales[heads, k] if there are some, times the weight of every head.
// weights: those of all heads as one tall weight. linear(args, weight, team) is run by a thread alone on some outputs
// of a head; it takes scratch_bytes of `working`, of which every thread has an equal part.
template <class Weight, class Linear>
static void head_linear(const Tensor& x, const Weight& weights, const Tensor& x_scales, int64_t scratch_bytes,
                        const Tensor& out, const Tensor& working, Team& team, const Linear& linear) {
  const int64_t m = x.size[0], heads = x.size[1], k = x.size[2], n = out.size[2];
  const int64_t head_blocks = blocks(n, kBlockN);
  // The parts of a head must begin with a cache line.
  const int64_t unit = n % kBlockN == 0 ? 1 : head_blocks;
  char* const own = working ? working.as<char>() + team.index * (working.size[0] / team.count) : nullptr;
  const auto matrix = [](const Tensor& of, int64_t head, int64_t first, int64_t columns) {
    char* const data = of.as<char>() + (head * of.stride[1] + first) * bytes_of(of.dtype);
    return Tensor{data, of.dtype, 2, {of.size[0], columns}, {of.stride[0], 1}};
  };
  const Tensor scratch{scratch_bytes ? own : nullptr, DType::u8, 1, {scratch_bytes}, {1}};
  const Range share = team.share(heads * head_blocks, unit);
  for (int64_t block = share.begin; block < share.end;) {
    const int64_t head = block / head_blocks, first = block % head_blocks * kBlockN;
    const int64_t end = std::min(share.end, (head + 1) * head_blocks);
    Tensor rows = matrix(x, head, 0, k);
    if (x_scales) {
      bf16* const scaled = reinterpret_cast<bf16*>(own + scratch_bytes);
      scale_rows(rows, x_scales.row<const float>(head), scaled);
      rows = {scaled, DType::bf16, 2, {m, k}, {k, 1}};
    }
    const Tensor result = matrix(out, head, first, std::min((end - block) * kBlockN, n - first)), no_bias{};
    Team alone = team.alone();
    linear({rows, no_bias, 0, result, scratch}, weights.from(block), alone);
    block = end;
  }
}

// Registers linear_<format> and head_linear_<format>, which call multiply(args, weight, team).
#define TR_LINEAR(format, Weight, multiply)                                                                       \
  TR_ENTRY(linear_##format, Team& team, const Tensor& x, const Weight& w, const Tensor& bias, int64_t activation, \
           const Tensor& out, const Tensor& scratch) {                                                            \
    if (x.size[0] > 0) multiply({x, bias, activation, out, scratch}, w, team);                                    \
  }                                                                                                               \
  TR_ENTRY(head_linear_##format, Team& team, const Tensor& x, const Weight& w, const Tensor& x_scales,            \
           int64_t scratch_bytes, const Tensor& out, const Tensor& working) {                                     \
    if (x.size[0] == 0) return;                                                                                   \
    head_linear(x, w, x_scales, scratch_bytes, out, working, team,                                                \
                [](const LinearArgs& args, const Weight& part, Team& alone) { multiply(args, part, alone); });    \
  }

}  // namespace tilerank::TR_RUNG
