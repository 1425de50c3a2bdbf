// attention with vector instructions.
#ifndef TR_RUNG
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention/attention_batch.h"
#include "core/cpu.h"
#define TR_SOURCE "attention/attention.cpp"
#include "simd/foreach_isa.h"
#else
#include "attention/attention_task-inl.h"
#include "attention/attention_vector_task-inl.h"

namespace tilerank::TR_RUNG {

static void run_attention(const Problem& problem, Team& team) {
  for_float(problem.q.dtype, [&](auto type) { attention_by_vectors<decltype(type)>(problem, team); });
}

}  // namespace tilerank::TR_RUNG
#endif
