// Products with NVFP4 weights, in vectors on every rung.
#ifndef TR_RUNG
#include <array>
#include <type_traits>

#include "core/cpu.h"
#include "block_scaled/block_scaled.h"
#define TR_SOURCE "block_scaled/linear_nvfp4.cpp"
#include "simd/foreach_isa.h"
#else
#include "block_scaled/linear_block_scaled-inl.h"
#include "block_scaled/nvfp4-inl.h"

namespace tilerank::TR_RUNG {

TR_LINEAR(nvfp4, FactoredWeight, linear<Nvfp4>)

}  // namespace tilerank::TR_RUNG
#endif
