// Products with int8 weights in vectors: rows are quantised at run time, sums are exact integers, one scaling follows.
#ifndef TR_RUNG
#include <array>
#include <utility>

#include "core/cpu.h"
#include "core/entry.h"
#include "linear/int8.h"

#define TR_SOURCE "linear/linear_int8.cpp"
#include "simd/foreach_isa.h"

#else
#include "simd/blocks-inl.h"
#include "linear/epilogue-inl.h"
#include "linear/entries-inl.h"
#include "linear/int8_rows-inl.h"
#include "linear/gemm_int8-inl.h"

namespace tilerank::TR_RUNG {

// All quantised rows, followed by their scales. The rows form stripes of about equal size, each of which stays in the
// L2 cache while it is multiplied with many blocks.
struct Int8Stripes {
  int64_t m, k, count;
  char* codes;

  Int8Stripes(int64_t m, int64_t k, char* codes) : m(m), k(k), codes(codes) {
    constexpr int64_t kBytes = 640 << 10, kLeastRows = 48;
    const int64_t most = std::clamp(kBytes / Int8Stripe::row_bytes(k), kLeastRows, Int8Stripe::kMostRows);
    count = blocks(m, most);
  }
  Range rows(int64_t stripe) const { return {m * stripe / count, m * (stripe + 1) / count}; }
  Int8Stripe operator[](int64_t stripe) const {
    const Range own = rows(stripe);
    return {codes + own.begin * Int8Stripe::row_bytes(k), own.end - own.begin, k};
  }
  float* row_scales() const { return reinterpret_cast<float*>(codes + m * Int8Stripe::row_bytes(k)); }
  static size_t bytes(int64_t m, int64_t k) {
    return static_cast<size_t>(m) * (static_cast<size_t>(Int8Stripe::row_bytes(k)) + sizeof(float));
  }

  // Quantises this thread's share of the rows.
  void quantise(const Tensor& x, const Team& team) const {
    const Range own = team.share(m);
    for (int64_t stripe = 0; stripe < count; ++stripe) {
      const Range all = rows(stripe);
      const Range some{std::max(own.begin, all.begin) - all.begin, std::min(own.end, all.end) - all.begin};
      const auto input = [&](int64_t row) { return x.row<const bf16>(all.begin + row); };
      (*this)[stripe].put(some, input, row_scales() + all.begin);
    }
  }
};

// scratch: Int8Stripes::bytes, or none if every thread quantises all rows for itself
static void linear_int8(const LinearArgs& args, const Int8Weight& w, Team& team) {
  const Tensor& x = args.x;
  const Epilogue epilogue(args);
  const int64_t m = x.size[0], k = x.size[1];
  const bool alone = !args.scratch;
  constexpr size_t kSumsBytes = Int8Stripe::kSums * sizeof(Ints);
  char* const memory = static_cast<char*>(team.scratch(kSumsBytes + (alone ? Int8Stripes::bytes(m, k) : 0)));
  Ints* const sums = reinterpret_cast<Ints*>(memory);
  const Int8Stripes stripes(m, k, alone ? memory + kSumsBytes : args.scratch.as<char>());
  stripes.quantise(x, alone ? Team(nullptr, 0, 1) : team);
  if (!alone) team.barrier();

  const Range share = team.share(stripes.count * epilogue.results);
  for (int64_t task = share.begin; task < share.end; ++task) {
    const int64_t stripe = task / epilogue.results, result = task % epilogue.results,
                  first = stripes.rows(stripe).begin;
    const auto emit = [&](int64_t row, const Vec32& values, const Vec32& up) {
      epilogue.write(first + row, result, values, up);
    };
    stripes[stripe].multiply(w, result * epilogue.parts, epilogue.parts, sums, stripes.row_scales() + first, emit);
  }
}
TR_LINEAR(int8, Int8Weight, linear_int8)

}  // namespace tilerank::TR_RUNG
#endif
