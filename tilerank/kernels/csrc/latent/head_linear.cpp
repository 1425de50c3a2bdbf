// head_linear with vector instructions.
#ifndef TR_RUNG
#include "core/registry.h"
#include "linear/pack.h"
#define TR_SOURCE "latent/head_linear.cpp"
#include "simd/foreach_isa.h"
#else
#include "latent/head_linear-inl.h"
#endif
