// Fused MoE with weights in the block formats of GGUF files, in vectors on every rung.
#ifndef TR_RUNG
#include <array>
#include <type_traits>

#include "core/cpu.h"
#include "moe/experts.h"
#include "block_scaled/gguf.h"
#define TR_SOURCE "moe/moe_gguf.cpp"
#include "simd/foreach_isa.h"
#else
#include "moe/block_scaled_product-inl.h"
#include "block_scaled/gguf_scales-inl.h"
#include "block_scaled/gguf_formats-inl.h"

namespace tilerank::TR_RUNG {

// Weights of any codes: the projections of an expert may have different ones.
class GgufProduct {
 public:
  using Weight = GgufWeight;
  using Input = bf16;
  using Middle = bf16;
  using Rounds = float;
  static constexpr int64_t kMemoryBoundRows = kWholeBlockRows;

  static size_t bytes(const ExpertsArgs<Weight>& a) { return BlockScaledProduct<GgufU4>::bytes(a); }
  GgufProduct(const ExpertsArgs<Weight>& a, char* memory) : args_(a), memory_(memory) {}

  template <int kParts, class Row, class To>
  void multiply(const Weight& w, int64_t k, int64_t rows, Range own, const Row& row, const To& to) const {
    const auto as = [&]<class Format>(std::type_identity<Format>) {
      BlockScaledProduct<Format>(args_, memory_).template multiply<kParts>(w, k, rows, own, row, to);
    };
    switch (w.tile_bytes()) {
      case CodePlanes<2>::kBytes:
        return as(std::type_identity<GgufU2>());
      case CodePlanes<3>::kBytes:
        return as(std::type_identity<GgufU3>());
      case CodePlanes<5>::kBytes:
        return as(std::type_identity<GgufU5>());
      case CodePlanes<6>::kBytes:
        return as(std::type_identity<GgufU6>());
      case kByteTile:
        return as(std::type_identity<GgufS8>());
      default:
        return w.has_table() ? as(std::type_identity<GgufIq4>()) : as(std::type_identity<GgufU4>());
    }
  }

 private:
  static constexpr int64_t kByteTile = kHalfN * kTileK;

  const ExpertsArgs<Weight>& args_;
  char* const memory_;
};

TR_MOE(gguf, GgufWeight, RowExperts<GgufProduct>)

}  // namespace tilerank::TR_RUNG
#endif
