// latent_attention in AMX tiles.
#ifndef TR_RUNG
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention/attention_batch.h"
#include "core/cpu.h"
#define TR_ONLY_AMX
#define TR_SOURCE "latent/latent_attention_amx.cpp"
#include "simd/foreach_isa.h"
#else
#include "simd/amx-inl.h"
#include "attention/attention_task-inl.h"
#include "latent/latent_task-inl.h"

namespace tilerank::TR_RUNG {

static void latent_attention(const Args& args, Team& team) {
  for_float(args.tensor(0).dtype, [&](auto type) { latent_attention<decltype(type)>(args, team); });
}
TR_KERNEL(latent_attention)

}  // namespace tilerank::TR_RUNG
#endif
