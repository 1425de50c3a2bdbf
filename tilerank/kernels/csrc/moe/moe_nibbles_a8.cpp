// Fused MoE with int4 and MXFP4 weights and int8 activations in vectors. x is quantised, and so is silu(gate) * up,
// which is kept in fp32 before.
#ifndef TR_RUNG
#include <array>
#include <type_traits>
#include <utility>

#include "block_scaled/block_scaled.h"
#include "core/cpu.h"
#include "linear/int8.h"
#include "moe/experts.h"
#define TR_SOURCE "moe/moe_nibbles_a8.cpp"
#include "simd/foreach_isa.h"
#else
#include "simd/blocks-inl.h"
#include "simd/nibbles-inl.h"
#include "moe/experts-inl.h"
#include "linear/int8_rows-inl.h"
#include "linear/gemm_int8-inl.h"
#include "linear/gemm_nibbles-inl.h"
#include "linear/int8_stripes-inl.h"
#include "moe/int8_product-inl.h"
#include "moe/form_product-inl.h"

namespace tilerank::TR_RUNG {

TR_MOE(int4_a8, OutputScaledWeight, RowExperts<FormProduct<Int4Forms, Int8Product> >)
TR_MOE(mxfp4_a8, OutputScaledWeight, RowExperts<Int8Product<Mxfp4Form> >)

}  // namespace tilerank::TR_RUNG
#endif
