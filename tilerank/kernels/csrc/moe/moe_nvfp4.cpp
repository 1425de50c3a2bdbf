// Fused MoE with NVFP4 weights, in vectors on every rung.
#ifndef TR_RUNG
#include <array>
#include <type_traits>

#include "core/cpu.h"
#include "moe/experts.h"
#include "block_scaled/block_scaled.h"
#define TR_SOURCE "moe/moe_nvfp4.cpp"
#include "simd/foreach_isa.h"
#else
#include "moe/block_scaled_product-inl.h"
#include "block_scaled/nvfp4-inl.h"

namespace tilerank::TR_RUNG {

TR_MOE(nvfp4, FactoredWeight, RowExperts<BlockScaledProduct<Nvfp4> >)

}  // namespace tilerank::TR_RUNG
#endif
