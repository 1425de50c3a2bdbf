// Fused MoE with weights in the block formats of GGUF files and int8 activations in vectors. x is
// quantised, and so is silu(gate) * up, which is kept in fp32 before.
#ifndef TR_RUNG
#include <array>
#include <type_traits>
#include <utility>

#include "block_scaled/gguf.h"
#include "core/cpu.h"
#include "linear/int8.h"
#include "moe/experts.h"
#define TR_SOURCE "moe/moe_gguf_a8.cpp"
#include "simd/foreach_isa.h"
#else
#include "simd/blocks-inl.h"
#include "simd/nibbles-inl.h"
#include "moe/experts-inl.h"
#include "linear/int8_rows-inl.h"
#include "linear/gemm_int8-inl.h"
#include "block_scaled/gguf_scales-inl.h"
#include "block_scaled/gguf_codes-inl.h"
#include "block_scaled/gguf_products-inl.h"
#include "linear/int8_stripes-inl.h"
#include "moe/int8_product-inl.h"
#include "moe/form_product-inl.h"

namespace tilerank::TR_RUNG {

// The projections of an expert may have codes of different kinds.
TR_MOE(gguf_a8, GgufWeight, RowExperts<FormProduct<AllGgufForms, Int8Product> >)

}  // namespace tilerank::TR_RUNG
#endif
