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

template <class Codes>
using GgufExperts = RowExperts<FormProduct<GgufForms<Codes>, Int8Product> >;

TR_MOE(gguf_u2_a8, GgufWeight, GgufExperts<GgufBytes2>)
TR_MOE(gguf_u3_a8, GgufWeight, GgufExperts<GgufBytes3>)
TR_MOE(gguf_u4_a8, GgufWeight, GgufExperts<GgufBytes4>)
TR_MOE(gguf_iq4_a8, GgufWeight, GgufExperts<Iq4Bytes>)
TR_MOE(gguf_u5_a8, GgufWeight, GgufExperts<GgufBytes5>)
TR_MOE(gguf_u6_a8, GgufWeight, GgufExperts<GgufBytes6>)
TR_MOE(gguf_s8_a8, GgufWeight, GgufExperts<WholeBytes>)

}  // namespace tilerank::TR_RUNG
#endif
