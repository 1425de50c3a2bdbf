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

static void attention(const Args& args, Team& team) {
  for_float(args.tensor(0).dtype, [&](auto type) { attention_by_vectors<decltype(type)>(args, team); });
}
TR_KERNEL(attention)

}  // namespace tilerank::TR_RUNG
#endif
