// delta_rule with vector instructions.
#ifndef TR_RUNG
#include <type_traits>

#include "delta/delta_problem.h"
#define TR_SOURCE "delta/delta_rule.cpp"
#include "simd/foreach_isa.h"
#else
#include "simd/transpose-inl.h"
#include "delta/recurrent-inl.h"
#include "delta/chunk-inl.h"
#include "delta/chunk_vectors-inl.h"
#include "delta/rule-inl.h"
#endif
