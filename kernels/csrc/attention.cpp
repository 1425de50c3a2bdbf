// attention with vector instructions.
#ifndef TR_RUNG
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention_batch.h"
#include "cpu.h"
#define TR_SOURCE "attention.cpp"
#include "foreach_isa.h"
#else
#include "attention_task.h"
#include "attention.h"

namespace tilerank::TR_RUNG {

static void attention(const Args& args, Team& team) {
  for_float(args.tensor(0).dtype, [&](auto type) { attention_by_vectors<decltype(type)>(args, team); });
}
TR_KERNEL(attention)

}  // namespace tilerank::TR_RUNG
#endif
