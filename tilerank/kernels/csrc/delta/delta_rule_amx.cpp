// delta_rule with AMX tiles, for bf16.
#ifndef TR_RUNG
#include <type_traits>

#include "delta/delta_problem.h"
#define TR_ONLY_AMX
#define TR_SOURCE "delta/delta_rule_amx.cpp"
#include "simd/foreach_isa.h"
#else
#include "simd/amx-inl.h"
#include "simd/transpose-inl.h"
#include "delta/recurrent-inl.h"
#include "delta/chunk-inl.h"
#include "delta/chunk_vectors-inl.h"
#include "delta/chunk_tiles-inl.h"
#include "delta/rule-inl.h"
#endif
