// causal_conv: a short convolution over the rows of every channel, with SiLU. Threads divide the channels, since the
// rows of a sequence share a slot that the kernel reads and replaces.
#ifndef TR_RUNG
#include "delta/delta_batch.h"
#define TR_SOURCE "delta/causal_conv.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

constexpr int64_t kConvChannels = 512;  // their weights and the last rows stay in L1
constexpr int64_t kMaxConvWidth = 8;

// A block of channels of one sequence. Row r < 0 is in its slot, row r >= 0 among the inputs of this step.
template <class T>
struct ConvInputs {
  const T* x;       // the first row
  int64_t stride;   // elements between rows
  T* slot;          // its first row: the window, and behind it drafts of the step before
  int64_t between;  // elements between rows of the slot
  const T* zeros;   // stands for the window of a sequence that begins here, or null
  int64_t width;
  int64_t kept;  // drafts of the step before that precede row 0

  const T* row(int64_t r) const {
    if (r >= 0) return x + r * stride;
    return zeros ? zeros : slot + (width - 1 + kept + r) * between;
  }
};

// out[i] = silu(sum over taps of weight * input). W: the width, or 0 if it is not a constant.
template <int W, class T>
static void conv_row(const ConvInputs<T>& inputs, int64_t row, const float* weights, T* out, int64_t channels) {
  const int64_t width = W ? W : inputs.width;
  const T* taps[kMaxConvWidth];
  for (int64_t tap = 0; tap < width; ++tap) taps[tap] = inputs.row(row - (width - 1) + tap);
  for_two(channels, [&](int64_t i, auto two) {
    Two total = {zero(), zero()};
    for (int64_t tap = 0; tap < width; ++tap) {
      const Two x = two.load(taps[tap] + i);
      const float* const w = weights + tap * kConvChannels + i;
      total = {fma(x.a, load(w), total.a), fma(x.b, load(w + kLanes), total.b)};
    }
    two.store(out + i, Two{silu(total.a), silu(total.b)});
  });
}

// The last width - 1 inputs up to row `certain` become the window, and the `drafts` rows from there on the drafts.
template <class T>
static void replace_slot(const ConvInputs<T>& inputs, int64_t certain, int64_t drafts, int64_t channels) {
  const int64_t before = inputs.width - 1;
  for (int64_t i = 0; i < before + drafts; ++i) {  // in ascending order, so that a row is read before it is replaced
    const T* const from = inputs.row(certain - before + i);
    T* const to = inputs.slot + i * inputs.between;
    if (from != to) std::memcpy(to, from, static_cast<size_t>(channels) * sizeof(T));
  }
}

template <class T>
static void conv_channels(const Tensor& x, const Tensor& weight, const Tensor& conv, const Tensor& out,
                          const DeltaBatch& batch, Range range, float* weights) {
  const int64_t width = weight.size[1], channels = range.end - range.begin;
  T* const zeros = reinterpret_cast<T*>(weights + kMaxConvWidth * kConvChannels);
  std::fill_n(zeros, kConvChannels, T{});
  // In the order in which a vector of elements of T is loaded: of bf16, the even ones and the odd ones.
  for (int64_t tap = 0; tap < width; ++tap) {
    T* const row = zeros + kConvChannels;
    for (int64_t i = 0; i < channels; ++i) row[i] = weight.row<T>(range.begin + i)[tap];
    for_two(channels, [&](int64_t i, auto two) {
      const Two w = two.load(row + i);
      store(weights + tap * kConvChannels + i, w.a);
      store(weights + tap * kConvChannels + i + kLanes, w.b);
    });
  }
  for (int64_t i = 0; i < batch.sequences; ++i) {
    if (!batch.has_states(i)) continue;
    const auto [begin, end] = batch.rows(i);
    const int64_t drafts = batch.drafts_end(i) - i - 1;
    const ConvInputs<T> inputs = {x.row<T>(begin) + range.begin,
                                  x.stride[0],
                                  conv.row<T>(batch.slots[i]) + range.begin,
                                  conv.stride[1],
                                  batch.is_fresh(i) ? zeros : nullptr,
                                  width,
                                  batch.kept[i]};
    for (int64_t row = begin; row < end + drafts; ++row) {
      T* const to = out.row<T>(row) + range.begin;
      width == 4 ? conv_row<4>(inputs, row - begin, weights, to, channels)
                 : conv_row<0>(inputs, row - begin, weights, to, channels);
    }
    replace_slot(inputs, end - begin, drafts, channels);
  }
  for (int64_t i = 0; i < batch.sequences; ++i) {
    if (!batch.is_padding(i)) continue;
    std::memcpy(out.row<T>(batch.rows(i).begin) + range.begin, out.row<T>(-1 - batch.slots[i]) + range.begin,
                static_cast<size_t>(channels) * sizeof(T));
  }
}

TR_ENTRY(causal_conv, Team& team, const Tensor& x, const Tensor& weight, const Tensor& conv, const Tensor& slots,
         const Tensor& kept, const Tensor& query_starts, const Tensor& seq_lens, const Tensor& out) {
  const DeltaBatch batch = {slots.as<int32_t>(), kept.as<int32_t>(), query_starts.as<int32_t>(), seq_lens.as<int32_t>(),
                            slots.size[0]};
  batch.check("causal_conv", conv.size[0], x.size[0], conv.size[1] - (weight.size[1] - 1));
  const size_t floats = (kMaxConvWidth + 2) * kConvChannels;
  float* const weights = static_cast<float*>(team.scratch(floats * sizeof(float)));
  const Range channels = team.share(x.size[1], 64);
  for_float(x.dtype, [&](auto type) {
    for (int64_t begin = channels.begin; begin < channels.end; begin += kConvChannels) {
      const Range range = {begin, std::min(begin + kConvChannels, channels.end)};
      conv_channels<decltype(type)>(x, weight, conv, out, batch, range, weights);
    }
  });
}

}  // namespace tilerank::TR_RUNG
#endif
