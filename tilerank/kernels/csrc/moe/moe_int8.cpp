// Fused MoE with int8 weights in vectors. x is quantised, and so is silu(gate) * up, which is kept in fp32 before.
#ifndef TR_RUNG
#include <array>
#include <type_traits>
#include <utility>

#include "core/cpu.h"
#include "moe/experts.h"
#include "linear/int8.h"
#define TR_SOURCE "moe/moe_int8.cpp"
#include "simd/foreach_isa.h"
#else
#include "simd/blocks-inl.h"
#include "moe/experts-inl.h"
#include "linear/int8_rows-inl.h"
#include "linear/gemm_int8-inl.h"
#include "linear/int8_stripes-inl.h"
#include "moe/int8_product-inl.h"

namespace tilerank::TR_RUNG {

TR_MOE(int8, Int8Weight, RowExperts<Int8Product<Int8Form> >)
TR_MOE(token_int8, Int8Weight, RowExperts<Int8Product<TokenInt8Form> >)

}  // namespace tilerank::TR_RUNG
#endif
