// NVFP4 (block_scaled.h) for the micro-kernels of block_scaled_rows-inl.h, compiled once per rung (no include guard;
// include after block_scaled_formats-inl.h).

namespace tilerank::TR_RUNG {

// A scale in e4m3 for each output and each K-block, times a factor of the output.
struct FactoredScales : PackedValues {
  using Weight = FactoredWeight;
  static constexpr bool kMayHaveZeros = false, kMayHaveMinimums = false;
  const uint8_t* const scales;
  const float* const factors;

  explicit FactoredScales(const Weight& w)
      : PackedValues(w.values), scales(w.scales.as<const uint8_t>()), factors(w.factors.as<const float>()) {}

  // The scales of outputs v * kLanes to v * kLanes + kLanes - 1 of a block.
  Vec scale(int64_t block, int64_t k_block, int64_t v) const {
    const uint8_t* const at = scales + (block * k_blocks + k_block) * kBlockN + v * kLanes;
    return magnitudes_of_e4m3(at) * load(factors + block * kBlockN + v * kLanes);
  }

  bool has_zeros() const { return false; }
  Vec negative_zero(int64_t, int64_t, int64_t) const { return zero(); }

  // Prefetches what scale() reads.
  void fetch_scales(int64_t block, int64_t k_block) const {
    _mm_prefetch(reinterpret_cast<const char*>(scales + (block * k_blocks + k_block) * kBlockN), _MM_HINT_T1);
  }
};

using Nvfp4 = NibbleCodes<E2m1Codes, FactoredScales, 16>;

}  // namespace tilerank::TR_RUNG
