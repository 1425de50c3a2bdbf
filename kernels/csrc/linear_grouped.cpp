// Products with int4 and fp8 weights in vectors.
#ifndef TR_RUNG
#include <array>

#include "grouped.h"
#define TR_SOURCE "linear_grouped.cpp"
#include "foreach_isa.h"
#else
#include "epilogue.h"
#include "gemm.h"
#include "grouped_formats.h"
#include "grouped_rows.h"

namespace tilerank::TR_RUNG {

template <class Format>
static void linear(const Args& args, Team& team) {
  const Tensor& x = args.tensor(0);
  const Epilogue epilogue(args);
  const Format weight(args.tensors + 5);
  const int64_t m = x.size[0], k = x.size[1];
  const size_t working = grouped_bytes(weight);
  char* const memory = static_cast<char*>(team.scratch(working + kGroupedRows * kBlockN * sizeof(float)));
  float* const gates = reinterpret_cast<float*>(memory + working);
  const Range own = team.share(epilogue.results);
  for (int64_t result = own.begin; result < own.end; ++result) {
    for (int64_t first = 0; first < m; first += kGroupedRows) {
      const int64_t count = std::min(kGroupedRows, m - first);
      const auto rows = [&](int64_t i) { return x.row<const bf16>(first + i); };
      if (epilogue.parts == 1) {
        multiply_grouped(rows, count, weight, result, k, memory,
                         [&](int64_t i, const Vec* sums) { epilogue.write(first + i, result, sums); });
        continue;
      }
      multiply_grouped(rows, count, weight, result * 2, k, memory, [&](int64_t i, const Vec* sums) {
        for (int v = 0; v < kVecs; ++v) store(gates + i * kBlockN + v * kLanes, sums[v]);
      });
      multiply_grouped(rows, count, weight, result * 2 + 1, k, memory, [&](int64_t i, const Vec* sums) {
        Vec gate[kVecs];
        for (int v = 0; v < kVecs; ++v) gate[v] = load(gates + i * kBlockN + v * kLanes);
        epilogue.write(first + i, result, gate, sums);
      });
    }
  }
}

// operands: grouped.h
static void linear_int4(const Args& args, Team& team) { linear<Int4>(args, team); }
TR_KERNEL(linear_int4)

static void linear_fp8(const Args& args, Team& team) { linear<Fp8>(args, team); }
TR_KERNEL(linear_fp8)

}  // namespace tilerank::TR_RUNG
#endif
