// head_linear in AMX tiles.
#ifndef TR_RUNG
#include "core/registry.h"
#include "linear/pack.h"
#define TR_ONLY_AMX
#define TR_SOURCE "latent/head_linear_amx.cpp"
#include "simd/foreach_isa.h"
#else
#include "latent/head_linear-inl.h"
#endif
