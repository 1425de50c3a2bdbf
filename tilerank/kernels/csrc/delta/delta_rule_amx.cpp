// delta_rule with AMX tiles, for bf16; fp32 stays with vectors, whose products are exact to fp32.
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

namespace tilerank::TR_RUNG {

static void delta_rule(const Args& args, Team& team) {
  for_float(args.tensor(0).dtype, [&](auto type) {
    using T = decltype(type);
    run_rule<T, std::conditional_t<std::is_same_v<T, bf16>, TilePanel, VectorPanel> >(args, team);
  });
}
TR_KERNEL(delta_rule)

}  // namespace tilerank::TR_RUNG
#endif
