// Products with weights in the block formats of GGUF files, in vectors on every rung.
#ifndef TR_RUNG
#include <array>
#include <type_traits>

#include "core/cpu.h"
#include "block_scaled/gguf.h"
#define TR_SOURCE "block_scaled/linear_gguf.cpp"
#include "simd/foreach_isa.h"
#else
#include "block_scaled/linear_block_scaled-inl.h"
#include "block_scaled/gguf_scales-inl.h"
#include "block_scaled/gguf_formats-inl.h"

namespace tilerank::TR_RUNG {

TR_LINEAR(gguf_u2, GgufWeight, linear<GgufU2>)
TR_LINEAR(gguf_u3, GgufWeight, linear<GgufU3>)
TR_LINEAR(gguf_u4, GgufWeight, linear<GgufU4>)
TR_LINEAR(gguf_iq4, GgufWeight, linear<GgufIq4>)
TR_LINEAR(gguf_u5, GgufWeight, linear<GgufU5>)
TR_LINEAR(gguf_u6, GgufWeight, linear<GgufU6>)
TR_LINEAR(gguf_s8, GgufWeight, linear<GgufS8>)

}  // namespace tilerank::TR_RUNG
#endif
