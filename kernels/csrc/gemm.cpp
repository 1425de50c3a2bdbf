#ifndef TR_RUNG
#include "cpu.h"
#include "deal.h"
#include "kernel.h"
#include "pack.h"

#define TR_SOURCE "gemm.cpp"
#include "foreach_isa.h"

#else
#include "epilogue.h"
#include "panels.h"
#include "products.h"

namespace tilerank::TR_RUNG {

// As multiply_results, by all threads of the team together, for many rows: a stripe of them with some results at a
// time.
template <class T, class Emit>
static void multiply_dealt(const RowPanels<T>& x, const BlockRun<T>& weight, int64_t parts, int64_t results,
                           const Deal& deal, const Team& team, void* memory, const Emit& emit) {
  const int64_t items = blocks(x.panels, kStripe) * results;
  for (;;) {
    Range some = deal.next(items, kGroup / parts, team);
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

template <class T>
static void linear(const Args& args, Team& team) {
  const Tensor& x = args.tensor(0);
  const Epilogue epilogue(args);
  char* const shared = args.tensor(4).as<char>();
  const Deal deal(shared);
  const RowPanels<T> rows(shared + Deal::kBytes, x.size[0], x.size[1]);
  if (team.index == 0) deal.begin();
  rows.pack([&](int64_t row) { return x.row<const T>(row); }, team);
  team.barrier();
  const BlockRun<T> weight{args.tensor(5).as<const T>(), x.size[1]};
  void* const memory = team.scratch(products_bytes<T>(rows.m));
  const auto emit = [&](int64_t row, int64_t result, const float* first, const float* last) {
    Vec sums[kVecs], up[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      sums[v] = load(first + v * kLanes);
      up[v] = load(last + v * kLanes);
    }
    epilogue.write(row, result, sums, up);
  };
  if (rows.panels < kManyPanels) {  // bound by memory, which runs of blocks read best
    return multiply_results(rows, weight, epilogue.parts, team.share(epilogue.results), memory, emit);
  }
  multiply_dealt(rows, weight, epilogue.parts, epilogue.results, deal, team, memory, emit);
}

// operands: the packed weight; scratch: Deal, RowPanels
static void linear_f32(const Args& args, Team& team) { linear<float>(args, team); }
TR_KERNEL(linear_f32)

static void linear_bf16(const Args& args, Team& team) { linear<bf16>(args, team); }
TR_KERNEL(linear_bf16)

}  // namespace tilerank::TR_RUNG
#endif
