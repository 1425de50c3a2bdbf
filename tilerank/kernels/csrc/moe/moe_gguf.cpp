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

TR_MOE(gguf_u2, GgufWeight, RowExperts<BlockScaledProduct<GgufU2> >)
TR_MOE(gguf_u3, GgufWeight, RowExperts<BlockScaledProduct<GgufU3> >)
TR_MOE(gguf_u4, GgufWeight, RowExperts<BlockScaledProduct<GgufU4> >)
TR_MOE(gguf_iq4, GgufWeight, RowExperts<BlockScaledProduct<GgufIq4> >)
TR_MOE(gguf_u5, GgufWeight, RowExperts<BlockScaledProduct<GgufU5> >)
TR_MOE(gguf_u6, GgufWeight, RowExperts<BlockScaledProduct<GgufU6> >)
TR_MOE(gguf_s8, GgufWeight, RowExperts<BlockScaledProduct<GgufS8> >)

}  // namespace tilerank::TR_RUNG
#endif
