// Products with int8 weights in vectors: rows are quantised at run time.
#ifndef TR_RUNG
#include <array>
#include <type_traits>
#include <utility>

#include "core/cpu.h"
#include "core/entry.h"
#include "linear/int8.h"

#define TR_SOURCE "linear/linear_int8.cpp"
#include "simd/foreach_isa.h"

#else
#include "simd/blocks-inl.h"
#include "linear/epilogue-inl.h"
#include "linear/entries-inl.h"
#include "linear/int8_rows-inl.h"
#include "linear/gemm_int8-inl.h"
#include "linear/int8_stripes-inl.h"
#include "linear/int8_linear-inl.h"

namespace tilerank::TR_RUNG {

TR_LINEAR(int8, Int8Weight, linear_int8_vectors<Int8Form>)
TR_LINEAR(token_int8, Int8Weight, linear_int8_vectors<TokenInt8Form>)

}  // namespace tilerank::TR_RUNG
#endif
