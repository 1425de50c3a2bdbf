// The linear kernel for block-scaled weights in vectors, compiled once per rung (no include guard).
#include "simd/blocks-inl.h"
#include "linear/epilogue-inl.h"
#include "linear/entries-inl.h"
#include "block_scaled/block_scaled_rows-inl.h"

namespace tilerank::TR_RUNG {

template <int kParts, class Format>
static void linear(const LinearArgs& args, const Format& weight, const Epilogue& epilogue, Team& team) {
  const Tensor& x = args.x;
  const int64_t m = x.size[0], k = x.size[1];
  const bool alone = !args.scratch;
  constexpr size_t working = sizeof(BlockScaledScratch);
  char* const memory =
      static_cast<char*>(team.scratch(working + (alone ? BlockScaledRows::bytes(m, k, weight.k_blocks) : 0)));
  const BlockScaledRows rows(alone ? memory + working : args.scratch.as<char>(), m, k, weight);
  rows.pack([&](int64_t i) { return x.row<const bf16>(i); }, weight, alone ? Team(nullptr, 0, 1) : team);
  if (!alone) team.barrier();
  const Range own = team.share(epilogue.results);
  for (int64_t panel = 0; panel < rows.panels.panels; panel += kStripePanels<Format>) {
    const Range stripe{panel, std::min(panel + kStripePanels<Format>, rows.panels.panels)};
    // Not inlined, because loops for several numbers of rows call it.
    const auto emit = [&] [[gnu::noinline]] (int64_t row, int64_t result, const float* const(&totals)[kParts]) {
      epilogue.write(row, result, load32(totals[0]), load32(totals[kParts - 1]));
    };
    multiply_results<kParts>(rows, stripe, weight, own, k, memory, emit);
  }
}

// scratch: BlockScaledRows::bytes, or none if every thread packs all rows for itself
template <class Format>
static void linear(const LinearArgs& args, const typename Format::Weight& w, Team& team) {
  const Epilogue epilogue(args);
  const Format weight(w);
  epilogue.parts == 2 ? linear<2>(args, weight, epilogue, team) : linear<1>(args, weight, epilogue, team);
}

}  // namespace tilerank::TR_RUNG
