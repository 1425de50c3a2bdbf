// Fused MoE with block-scaled weights in vectors. silu(gate) * up is rounded once, to bf16.
#ifndef TR_RUNG
#include <array>
#include <type_traits>

#include "core/cpu.h"
#include "moe/experts.h"
#include "block_scaled/block_scaled.h"
#define TR_SOURCE "moe/moe_block_scaled.cpp"
#include "simd/foreach_isa.h"
#else
#include "moe/block_scaled_product-inl.h"

namespace tilerank::TR_RUNG {

TR_MOE(int4, OutputScaledWeight, RowExperts<BlockScaledProduct<Int4> >)
TR_MOE(mxfp4, OutputScaledWeight, RowExperts<BlockScaledProduct<Mxfp4> >)
TR_MOE(fp8, ByteCodesWeight, RowExperts<BlockScaledProduct<Fp8> >)
TR_MOE(block_int8, ByteCodesWeight, RowExperts<BlockScaledProduct<BlockInt8> >)
TR_MOE(channel_fp8, OutputScaledWeight, RowExperts<BlockScaledProduct<ChannelFp8> >)
TR_MOE(group_int8, OutputScaledWeight, RowExperts<BlockScaledProduct<GroupInt8> >)

}  // namespace tilerank::TR_RUNG
#endif
