// Products with block-scaled weights in vectors.
#ifndef TR_RUNG
#include <array>
#include <type_traits>

#include "core/cpu.h"
#include "block_scaled/block_scaled.h"
#define TR_SOURCE "block_scaled/linear_block_scaled.cpp"
#include "simd/foreach_isa.h"
#else
#include "block_scaled/linear_block_scaled-inl.h"

namespace tilerank::TR_RUNG {

TR_LINEAR(int4, OutputScaledWeight, linear<Int4>)
TR_LINEAR(mxfp4, OutputScaledWeight, linear<Mxfp4>)
TR_LINEAR(fp8, ByteCodesWeight, linear<Fp8>)
TR_LINEAR(block_int8, ByteCodesWeight, linear<BlockInt8>)
TR_LINEAR(channel_fp8, OutputScaledWeight, linear<ChannelFp8>)
TR_LINEAR(group_int8, OutputScaledWeight, linear<GroupInt8>)

}  // namespace tilerank::TR_RUNG
#endif
