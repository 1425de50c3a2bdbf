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
#endif
