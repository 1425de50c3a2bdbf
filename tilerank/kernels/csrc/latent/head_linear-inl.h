// Products of every head with a weight of its own, compiled once per rung (no include guard). Each head's product is
// one of the linear kernels (linear/epilogue-inl.h), which a thread runs alone on some of the head's outputs.

namespace tilerank::TR_RUNG {

static int64_t element_bytes(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
    default:
      return 1;
  }
}

// to[m, k] = x * scales, rounded.
static void scale_rows(const Tensor& x, const float* scales, bf16* to) {
  for (int64_t row = 0; row < x.size[0]; ++row, to += x.size[1]) {
    for_lanes(x.size[1], [&](int64_t i, auto lanes) {
      lanes.store(to + i, lanes.load(x.row<const bf16>(row) + i) * lanes.load(scales + i));
    });
  }
}

// tensors: x[t, heads, k], x_scales[heads, k] f32 or none, out[t, heads, n], working or none, then the operands of the
// weights of all heads as one tall weight
// ints: the linear kernel's number; its scratch bytes, per thread
static void head_linear(const Args& args, Team& team) {
  const Tensor &x = args.tensor(0), &x_scales = args.tensor(1), &out = args.tensor(2), &working = args.tensor(3);
  constexpr int kOperands = 4;
  const Kernel linear = find_kernel(static_cast<int>(args.integer(0)), TR_ISA);
  const int64_t m = x.size[0], heads = x.size[1], k = x.size[2], n = out.size[2];
  const int64_t head_blocks = blocks(n, kBlockN), scratch_bytes = args.integer(1);
  // The parts of a head must begin with a cache line.
  const int64_t unit = n % kBlockN == 0 ? 1 : head_blocks;
  char* const own = working ? working.as<char>() + team.index * (working.size[0] / team.count) : nullptr;

  const auto matrix = [](const Tensor& of, int64_t head, int64_t first, int64_t columns) {
    const int64_t element = of.dtype == DType::f32 ? 4 : 2;
    char* const data = of.as<char>() + (head * of.stride[1] + first) * element;
    return Tensor{data, of.dtype, 2, {of.size[0], columns}, {of.stride[0], 1}};
  };
  // Operands consist of blocks of 32 outputs.
  const auto operand = [&](Tensor t, int64_t block) {
    if (!t) return t;
    int64_t elements = 1;
    for (int i = 0; i < t.ndim; ++i) elements *= t.size[i];
    t.data = t.as<char>() + elements / (heads * head_blocks) * block * element_bytes(t.dtype);
    return t;
  };
  const Range share = team.share(heads * head_blocks, unit);
  for (int64_t block = share.begin; block < share.end;) {
    const int64_t head = block / head_blocks, first = block % head_blocks * kBlockN;
    const int64_t end = std::min(share.end, (head + 1) * head_blocks);
    const int64_t columns = std::min((end - block) * kBlockN, n - first);
    Args part{};
    part.tensors[0] = matrix(x, head, 0, k);
    if (x_scales) {
      bf16* const scaled = reinterpret_cast<bf16*>(own + scratch_bytes);
      scale_rows(part.tensors[0], x_scales.row<const float>(head), scaled);
      part.tensors[0] = {scaled, DType::bf16, 2, {m, k}, {k, 1}};
    }
    part.tensors[3] = matrix(out, head, first, columns);
    if (scratch_bytes) part.tensors[4] = {own, DType::u8, 1, {scratch_bytes}, {1}};
    part.num_tensors = 5;
    for (int i = kOperands; i < args.num_tensors; ++i) {
      part.tensors[part.num_tensors++] = operand(args.tensor(i), block);
    }
    part.num_ints = 1;  // no activation
    Team alone = team.alone();
    linear(part, alone);
    block = end;
  }
}
TR_KERNEL(head_linear)

}  // namespace tilerank::TR_RUNG
