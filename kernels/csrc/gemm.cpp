#ifndef TR_RUNG
#include "kernel.h"
#include "pack.h"

#define TR_SOURCE "gemm.cpp"
#include "foreach_isa.h"

#else
#include "epilogue.h"
#include "gemm.h"

namespace tilerank::TR_RUNG {

template <class T>
static void linear(const Args& args, Team& team) {
  const Tensor &x = args.tensor(0), &weight = args.tensor(1);
  const Epilogue epilogue(args.tensor(2), args.tensor(3));
  const int64_t m = x.size[0], k = x.size[1];
  const Range share = team.share(blocks(epilogue.n, kBlockN));
  for (int64_t block = share.begin; block < share.end; ++block) {
    const T* const data = weight.as<const T>() + block * block_elements<T>(k);
    multiply_block([&](int64_t row) { return x.row<const T>(row); }, m, data, k,
                   [&](int64_t row, const Vec* sums) {
                     for (int v = 0; v < kVecs; ++v) epilogue.write(sums[v], row, block * kBlockN + v * kLanes);
                   });
  }
}

// tensors: x[m, k], packed weight, bias[n] or none, out[m, n]
static void linear_f32(const Args& args, Team& team) { linear<float>(args, team); }
TR_KERNEL(linear_f32)

// tensors: the same, and scratch that only the amx rung uses
static void linear_bf16(const Args& args, Team& team) { linear<bf16>(args, team); }
TR_KERNEL(linear_bf16)

}  // namespace tilerank::TR_RUNG
#endif
