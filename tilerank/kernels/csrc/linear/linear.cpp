// Products with bf16 and fp32 weights in vectors.
#ifndef TR_RUNG
#include <array>

#include "core/cpu.h"
#include "core/entry.h"
#include "core/work_queue.h"
#include "linear/pack.h"

#define TR_SOURCE "linear/linear.cpp"
#include "simd/foreach_isa.h"

#else
#include "simd/blocks-inl.h"
#include "linear/epilogue-inl.h"
#include "linear/entries-inl.h"
#include "linear/panels-inl.h"
#include "linear/products-inl.h"

namespace tilerank::TR_RUNG {

// multiply_results for many rows: all threads take items, a stripe of rows with some results each, from one queue.
template <class T, class Emit>
static void multiply_queued(const RowPanels<T>& x, const PackedBlocks<T>& weight, int64_t parts, int64_t results,
                            const WorkQueue& queue, const Team& team, void* memory, const Emit& emit) {
  const int64_t items = blocks(x.panels, kStripe) * results;
  for (;;) {
    Range some = queue.next(items, kStripeBlocks / parts, team);
    if (some.begin == some.end) return;
    while (some.begin < some.end) {
      const int64_t stripe = some.begin / results, first = stripe * results;
      const int64_t end = std::min(some.end, first + results);
      const Range panels{stripe * kStripe, std::min((stripe + 1) * kStripe, x.panels)};
      multiply_stripe(x, panels, weight, parts, {some.begin - first, end - first}, static_cast<float*>(memory), emit);
      some.begin = end;
    }
  }
}

// scratch: a WorkQueue, then RowPanels
template <class T>
static void linear(const LinearArgs& args, const FloatWeight& w, Team& team) {
  const Tensor& x = args.x;
  const Epilogue epilogue(args);
  char* const shared = args.scratch.as<char>();
  const WorkQueue queue(shared);
  const RowPanels<T> rows(shared + WorkQueue::kBytes, x.size[0], x.size[1]);
  if (team.index == 0) queue.begin();
  rows.pack([&](int64_t row) { return x.row<const T>(row); }, team);
  team.barrier();
  const PackedBlocks<T> weight{w.data.as<const T>(), x.size[1]};
  void* const memory = team.scratch(products_bytes<T>(rows.m));
  const auto emit = [&](int64_t row, int64_t result, const float* first, const float* last) {
    epilogue.write(row, result, load32(first), load32(last));
  };
  if (rows.panels < kManyPanels) {  // bound by memory: each thread reads a contiguous run of blocks
    return multiply_results(rows, weight, epilogue.parts, team.share(epilogue.results), memory, emit);
  }
  multiply_queued(rows, weight, epilogue.parts, epilogue.results, queue, team, memory, emit);
}

TR_LINEAR(f32, FloatWeight, linear<float>)
TR_LINEAR(bf16, FloatWeight, linear<bf16>)

}  // namespace tilerank::TR_RUNG
#endif
