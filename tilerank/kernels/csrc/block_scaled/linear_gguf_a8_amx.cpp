// Products of int8 activations with weights in the block formats of GGUF files, in AMX tiles: rows are quantised at
// run time, and codes expanded to bytes.
#ifndef TR_RUNG
#include <array>
#include <type_traits>
#include <utility>

#include "block_scaled/gguf.h"
#include "core/cpu.h"
#include "core/entry.h"
#include "linear/int8.h"

#define TR_ONLY_AMX
#define TR_SOURCE "block_scaled/linear_gguf_a8_amx.cpp"
#include "simd/foreach_isa.h"

#else
#include "simd/blocks-inl.h"
#include "simd/nibbles-inl.h"
#include "linear/epilogue-inl.h"
#include "linear/entries-inl.h"
#include "linear/gemm_amx-inl.h"
#include "linear/finish_amx-inl.h"
#include "linear/int8_rows-inl.h"
#include "linear/gemm_int8-inl.h"
#include "block_scaled/gguf_scales-inl.h"
#include "block_scaled/gguf_codes-inl.h"
#include "block_scaled/gguf_products-inl.h"
#include "linear/int8_stripes-inl.h"
#include "linear/int8_tiles_amx-inl.h"
#include "linear/int8_linear-inl.h"

namespace tilerank::TR_RUNG {

template <class Codes>
static void linear_codes(const LinearArgs& args, const GgufWeight& w, Team& team) {
  GgufForms<Codes>::with(w, [&]<class Form>(Form) { linear_int8_tiles<Form>(args, w, team); });
}

TR_LINEAR(gguf_u2_a8, GgufWeight, linear_codes<GgufBytes2>)
TR_LINEAR(gguf_u3_a8, GgufWeight, linear_codes<GgufBytes3>)
TR_LINEAR(gguf_u4_a8, GgufWeight, linear_codes<GgufBytes4>)
TR_LINEAR(gguf_iq4_a8, GgufWeight, linear_codes<Iq4Bytes>)
TR_LINEAR(gguf_u5_a8, GgufWeight, linear_codes<GgufBytes5>)
TR_LINEAR(gguf_u6_a8, GgufWeight, linear_codes<GgufBytes6>)
TR_LINEAR(gguf_s8_a8, GgufWeight, linear_codes<WholeBytes>)

}  // namespace tilerank::TR_RUNG
#endif
