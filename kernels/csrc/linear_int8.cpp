// The product of rows with an int8 weight: rows are quantised as they come, sums are exact, and one scaling follows.
#ifndef TR_RUNG
#include "int8.h"
#include "kernel.h"

#define TR_SOURCE "linear_int8.cpp"
#include "foreach_isa.h"

#else
#include "epilogue.h"
#include "int8_rows.h"
#include "gemm_int8.h"

namespace tilerank::TR_RUNG {

// operands: codes, scales; scratch: bytes [m][k up to 64s] for codes of x, then [m] fp32 for steps
static void linear_int8(const Args& args, Team& team) {
  constexpr int64_t kChunk = 10 * kRows8;  // rows whose gates are kept until their other part is there
  const Tensor &x = args.tensor(0), &codes = args.tensor(5), &scales = args.tensor(6);
  const Epilogue epilogue(args);
  const int64_t m = x.size[0], k = x.size[1], row_bytes = row_bytes8(k);
  int8_t* const rows = args.tensor(4).as<int8_t>();
  float* const steps = reinterpret_cast<float*>(rows + m * row_bytes);
  const Range own = team.share(m);
  for (int64_t row = own.begin; row < own.end; ++row) {
    steps[row] =
        quantise_row(x.row<const bf16>(row), k, [&](int64_t t) { return rows + row * row_bytes + t * kBlockK8; });
  }
  team.barrier();
  const Range share = team.share(epilogue.results);
  for (int64_t result = share.begin; result < share.end; ++result) {
    for (int64_t first = 0; first < m; first += kChunk) {
      Vec parts[2][kChunk][kVecs8];
      for (int64_t part = 0; part < epilogue.parts; ++part) {
        const int64_t block = result * epilogue.parts + part;
        const int8_t* const weight = codes.as<const int8_t>() + block * row_bytes * kBlockN;
        const float* const scale = scales.as<const float>() + block * kBlockN;
        multiply_block8(rows + first * row_bytes, row_bytes, std::min(kChunk, m - first), weight,
                        [&](int64_t i, const Ints* sums) {
                          for (int v = 0; v < kVecs8; ++v) {
                            parts[part][i][v] = scaled(sums[v], steps[first + i], scale + v * kLanes);
                          }
                          if (part + 1 == epilogue.parts) epilogue.write(first + i, result, parts[0][i], parts[1][i]);
                        });
      }
    }
  }
}
TR_KERNEL(linear_int8)

}  // namespace tilerank::TR_RUNG
#endif
