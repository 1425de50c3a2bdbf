// Compiles the file named by TR_SOURCE once per rung of the ISA ladder. core/kernel.h shows the shape of a kernel file.
//
// Target regions replace per-file flags: everything that is included before a region opens (std headers, kernel.h) is
// compiled for the baseline only, so no shared inline function contains instructions that a CPU may lack.
// Each rung defines TR_RUNG (its namespace), TR_ISA (its Isa value) and its features (TR_AVX2 or TR_AVX512; TR_BF16,
// TR_AMX), and includes simd-inl.h. A build for tests leaves out the newest TR_LEFT_OUT rungs (setup.py).
//
// GCC warns about its own "undefined" vectors, which are read before they are set (bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/kernel.h"

#if defined(__clang__)
#define TR_PRAGMA(x) _Pragma(#x)
#define TR_REGION_BEGIN(isas) TR_PRAGMA(clang attribute push(__attribute__((target(isas))), apply_to = function))
#define TR_REGION_END _Pragma("clang attribute pop")
#else
#define TR_PRAGMA(x) _Pragma(#x)
#define TR_REGION_BEGIN(isas) _Pragma("GCC push_options") TR_PRAGMA(GCC target(isas))
#define TR_REGION_END _Pragma("GCC pop_options")
#endif

#define TR_TARGET_AVX2 "avx2,fma,f16c,bmi,bmi2"
#define TR_TARGET_AVX512 "avx2,fma,f16c,bmi,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"
#define TR_TARGET_AVX512_BF16 TR_TARGET_AVX512 ",avx512vbmi,avx512bf16"
#ifdef TR_EMULATE_AMX
#define TR_TARGET_AMX TR_TARGET_AVX512_BF16
#else
#define TR_TARGET_AMX TR_TARGET_AVX512_BF16 ",amx-tile,amx-bf16,amx-int8"
#endif

#ifndef TR_ONLY_AMX

#define TR_RUNG avx2
#define TR_ISA ::tilerank::Isa::avx2
#define TR_AVX2 1
TR_REGION_BEGIN(TR_TARGET_AVX2)
#include "simd/simd-inl.h"
#include TR_SOURCE
TR_REGION_END
#undef TR_RUNG
#undef TR_ISA
#undef TR_AVX2
#if TR_LEFT_OUT < 3
#define TR_RUNG avx512
#define TR_ISA ::tilerank::Isa::avx512
#define TR_AVX512 1
TR_REGION_BEGIN(TR_TARGET_AVX512)
#include "simd/simd-inl.h"
#include TR_SOURCE
TR_REGION_END
#undef TR_RUNG
#undef TR_ISA
#undef TR_AVX512
#if TR_LEFT_OUT < 2
#define TR_RUNG avx512_bf16
#define TR_ISA ::tilerank::Isa::avx512_bf16
#define TR_AVX512 1
#define TR_BF16 1
TR_REGION_BEGIN(TR_TARGET_AVX512_BF16)
#include "simd/simd-inl.h"
#include TR_SOURCE
TR_REGION_END
#undef TR_RUNG
#undef TR_ISA
#undef TR_AVX512
#undef TR_BF16
#endif
#endif
#elif TR_LEFT_OUT < 1
#define TR_RUNG amx
#define TR_ISA ::tilerank::Isa::amx
#define TR_AVX512 1
#define TR_BF16 1
#define TR_AMX 1
TR_REGION_BEGIN(TR_TARGET_AMX)
#include "simd/simd-inl.h"
#include TR_SOURCE
TR_REGION_END
#undef TR_RUNG
#undef TR_ISA
#undef TR_AVX512
#undef TR_BF16
#undef TR_AMX

#endif
