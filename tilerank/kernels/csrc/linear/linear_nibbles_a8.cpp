// Products of int8 activations with int4 and MXFP4 weights in vectors: rows are quantised at run time.
#ifndef TR_RUNG
#include <array>
#include <type_traits>
#include <utility>

#include "block_scaled/block_scaled.h"
#include "core/cpu.h"
#include "core/entry.h"
#include "linear/int8.h"

#define TR_SOURCE "linear/linear_nibbles_a8.cpp"
#include "simd/foreach_isa.h"

#else
#include "simd/blocks-inl.h"
#include "simd/nibbles-inl.h"
#include "linear/epilogue-inl.h"
#include "linear/entries-inl.h"
#include "linear/int8_rows-inl.h"
#include "linear/gemm_int8-inl.h"
#include "linear/gemm_nibbles-inl.h"
#include "linear/int8_stripes-inl.h"
#include "linear/int8_linear-inl.h"

namespace tilerank::TR_RUNG {

static void linear_int4_a8(const LinearArgs& args, const OutputScaledWeight& w, Team& team) {
  Int4Forms::with(w, [&]<class Form>(Form) { linear_int8_vectors<Form>(args, w, team); });
}
TR_LINEAR(int4_a8, OutputScaledWeight, linear_int4_a8)
TR_LINEAR(mxfp4_a8, OutputScaledWeight, linear_int8_vectors<Mxfp4Form>)

}  // namespace tilerank::TR_RUNG
#endif
