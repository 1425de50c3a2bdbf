// The product of rows with an int8 weight: rows are quantised as they come, sums are exact, and one scaling follows.
#ifndef TR_RUNG
#include <utility>

#include "cpu.h"
#include "int8.h"
#include "kernel.h"

#define TR_SOURCE "linear_int8.cpp"
#include "foreach_isa.h"

#else
#include "epilogue.h"
#include "int8_rows.h"
#include "gemm_int8.h"

namespace tilerank::TR_RUNG {

// All rows, and behind them their steps, in stripes that are about equal and stay in the second-level cache, each while
// it is multiplied with many blocks.
struct Stripes8 {
  int64_t m, k, count;
  char* codes;

  Stripes8(int64_t m, int64_t k, char* codes) : m(m), k(k), codes(codes) {
    constexpr int64_t kBytes = 640 << 10, kLeastRows = 48;
    const int64_t most = std::clamp(kBytes / Stripe8::row_bytes(k), kLeastRows, Stripe8::kMostRows);
    count = blocks(m, most);
  }
  Range rows(int64_t stripe) const { return {m * stripe / count, m * (stripe + 1) / count}; }
  Stripe8 operator[](int64_t stripe) const {
    const Range own = rows(stripe);
    return {codes + own.begin * Stripe8::row_bytes(k), own.end - own.begin, k};
  }
  float* steps() const { return reinterpret_cast<float*>(codes + m * Stripe8::row_bytes(k)); }
  static size_t bytes(int64_t m, int64_t k) {
    return static_cast<size_t>(m) * (static_cast<size_t>(Stripe8::row_bytes(k)) + sizeof(float));
  }

  // This thread's share of all rows.
  void quantise(const Tensor& x, const Team& team) const {
    const Range own = team.share(m);
    for (int64_t stripe = 0; stripe < count; ++stripe) {
      const Range all = rows(stripe);
      const Range some{std::max(own.begin, all.begin) - all.begin, std::min(own.end, all.end) - all.begin};
      const auto input = [&](int64_t row) { return x.row<const bf16>(all.begin + row); };
      (*this)[stripe].put(some, input, steps() + all.begin);
    }
  }
};

// operands: those of int8.h; scratch: Stripes8::bytes, or none for rows that every thread quantises for itself
static void linear_int8(const Args& args, Team& team) {
  const Tensor &x = args.tensor(0), &weight = args.tensor(5);
  const Epilogue epilogue(args);
  const int64_t m = x.size[0], k = x.size[1];
  const bool alone = !args.tensor(4);
  constexpr int64_t kPart = Stripe8::kMostRows * kVecs8;
  constexpr size_t kSumsBytes = 2 * kPart * sizeof(Ints);
  char* const memory = static_cast<char*>(team.scratch(kSumsBytes + (alone ? Stripes8::bytes(m, k) : 0)));
  Ints* const sums = reinterpret_cast<Ints*>(memory);
  const Stripes8 stripes(m, k, alone ? memory + kSumsBytes : args.tensor(4).as<char>());
  stripes.quantise(x, alone ? Team(nullptr, 0, 1) : team);
  if (!alone) team.barrier();

  const Range share = team.share(stripes.count * epilogue.results);
  for (int64_t task = share.begin; task < share.end; ++task) {
    const int64_t stripe = task / epilogue.results, result = task % epilogue.results,
                  first = stripes.rows(stripe).begin;
    const Stripe8 rows = stripes[stripe];
    const float* const steps = stripes.steps() + first;
    const auto block_of = [&](int64_t part) { return Block8(&weight, result * epilogue.parts + part, k); };
    for (int64_t part = 0; part < epilogue.parts; ++part) rows.multiply(block_of(part).codes, sums + part * kPart);
    for (int64_t row = 0; row < rows.rows; ++row) {
      Vec parts[2][kVecs8];
      for (int64_t part = 0; part < epilogue.parts; ++part) {
        rows.values(sums + part * kPart, row, steps[row], block_of(part), parts[part]);
      }
      epilogue.write(first + row, result, parts[0], parts[1]);
    }
  }
}
TR_KERNEL(linear_int8)

}  // namespace tilerank::TR_RUNG
#endif
