#ifndef TR_RUNG
#include "kernel.h"
#include "pack.h"

#define TR_SOURCE "gemm.cpp"
#include "foreach_isa.h"

#else
#include "epilogue.h"
#include "panels.h"
#include "products.h"

namespace tilerank::TR_RUNG {

template <class T>
static void linear(const Args& args, Team& team) {
  const Tensor& x = args.tensor(0);
  const Epilogue epilogue(args);
  const RowPanels<T> rows(args.tensor(4).data, x.size[0], x.size[1]);
  rows.pack([&](int64_t row) { return x.row<const T>(row); }, team);
  team.barrier();
  const BlockRun<T> weight{args.tensor(5).as<const T>(), x.size[1]};
  multiply_results(rows, weight, epilogue.parts, team.share(epilogue.results), team.scratch(products_bytes<T>(rows.m)),
                   [&](int64_t row, int64_t result, const float* first, const float* last) {
                     Vec sums[kVecs], up[kVecs];
                     for (int v = 0; v < kVecs; ++v) {
                       sums[v] = load(first + v * kLanes);
                       up[v] = load(last + v * kLanes);
                     }
                     epilogue.write(row, result, sums, up);
                   });
}

// operands: the packed weight; scratch: RowPanels
static void linear_f32(const Args& args, Team& team) { linear<float>(args, team); }
TR_KERNEL(linear_f32)

static void linear_bf16(const Args& args, Team& team) { linear<bf16>(args, team); }
TR_KERNEL(linear_bf16)

}  // namespace tilerank::TR_RUNG
#endif
