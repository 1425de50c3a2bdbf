// How threads share a convolution, compiled once per rung (no include guard): a stripe of rows is multiplied with
// blocks of outputs, one after the other.

namespace tilerank::TR_RUNG {

constexpr int64_t kStripeBytes = 448 << 10;  // of packed rows, which stay in the L2 cache beside a block of the weight

// Calls begin(stripe) and then multiply(stripe, block, next) for every block of this thread's share of the stripe.
// next: the block that follows, here or in the next stripe, or the last block itself.
template <class Begin, class Multiply>
static void for_stripes(int64_t stripes, int64_t outputs, Team& team, const Begin& begin, const Multiply& multiply) {
  const Range items = team.share(stripes * outputs);
  for (int64_t item = items.begin; item < items.end;) {
    const int64_t stripe = item / outputs, end = std::min(items.end, (stripe + 1) * outputs);
    begin(stripe);
    for (; item < end; ++item) multiply(stripe, item % outputs, std::min(item + 1, items.end - 1) % outputs);
  }
}

}  // namespace tilerank::TR_RUNG
