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
  constexpr int64_t kChunk = 20 * kRows;  // rows whose gates are kept until their other part is there
  const Tensor &x = args.tensor(0), &weight = args.tensor(5);
  const Epilogue epilogue(args);
  const int64_t m = x.size[0], k = x.size[1];
  const Range share = team.share(epilogue.results);
  for (int64_t result = share.begin; result < share.end; ++result) {
    const T* const data = weight.as<const T>() + result * epilogue.parts * block_elements<T>(k);
    if (epilogue.parts == 1) {
      multiply_block([&](int64_t row) { return x.row<const T>(row); }, m, data, k,
                     [&](int64_t row, const Vec* sums) { epilogue.write(row, result, sums); });
      continue;
    }
    for (int64_t first = 0; first < m; first += kChunk) {
      const int64_t count = std::min(kChunk, m - first);
      const auto rows = [&](int64_t i) { return x.row<const T>(first + i); };
      Vec gates[kChunk][kVecs];
      multiply_block(rows, count, data, k, [&](int64_t i, const Vec* sums) { std::copy_n(sums, kVecs, gates[i]); });
      multiply_block(rows, count, data + block_elements<T>(k), k,
                     [&](int64_t i, const Vec* sums) { epilogue.write(first + i, result, gates[i], sums); });
    }
  }
}

// operands: the packed weight
static void linear_f32(const Args& args, Team& team) { linear<float>(args, team); }
TR_KERNEL(linear_f32)

static void linear_bf16(const Args& args, Team& team) { linear<bf16>(args, team); }
TR_KERNEL(linear_bf16)

}  // namespace tilerank::TR_RUNG
#endif
