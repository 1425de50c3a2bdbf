// latent_attention with vector instructions.
#ifndef TR_RUNG
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention/attention_batch.h"
#include "core/cpu.h"
#define TR_SOURCE "latent/latent_attention.cpp"
#include "simd/foreach_isa.h"
#else
#include "attention/attention_task-inl.h"
#include "latent/latent_task-inl.h"
#endif
