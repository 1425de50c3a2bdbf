// Which rungs of the ISA ladder this machine can run, and why not.
#pragma once
#include <string>

#include "core/kernel.h"

namespace tilerank {

const char* isa_name(Isa isa);

// A build for tests in which the amx rung runs on emulated tiles (simd/amx_emulated-inl.h): any CPU with the
// avx512_bf16 rung can run it.
#ifdef TR_EMULATE_AMX
constexpr bool kEmulatesAmx = true;
#else
constexpr bool kEmulatesAmx = false;
#endif

// Empty when the rung can run: CPUID, the operating system's XCR0, its permission for tile data (AMX), and a
// computation with known result. The first call asks the system for the permission, so it must come before threads.
const std::string& isa_obstacle(Isa isa);

// Up to so many rows of x a weight, or keys and values, are read line by line, in the order of memory: the rate of
// memory is what counts, and processors follow one stream better than two side by side.
constexpr int kRowsInOrder = 4;

// Whether the processor follows such a stream better alone than with requests for what is ahead. AMD's up to Zen 4 do:
// one core read 28 GB/s alone and 22 with requests, two cores 33 and 30. A Zen 5 does not: int8 weights for one row 33
// and 41 GB/s, keys and values of one core 19 and 32.
bool follows_streams();

}  // namespace tilerank
