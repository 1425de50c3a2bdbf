// Which rungs of the ISA ladder this machine can run, and why it cannot run the others.
#pragma once
#include <string>

#include "core/kernel.h"

namespace tilerank {

const char* isa_name(Isa isa);

// A build for tests runs the amx rung on emulated tiles (simd/amx_emulated-inl.h), on any CPU with the avx512_bf16
// rung. Only files of core/ and those with tiles, *_amx.cpp, are compiled for it (setup.py).
#ifdef TR_EMULATE_AMX
constexpr bool kEmulatesAmx = true;
#else
constexpr bool kEmulatesAmx = false;
#endif

// Returns an empty string if the rung can run, otherwise the reason. Checks CPUID, the operating system's XCR0, its
// permission for tile data (AMX), and a computation with a known result. The first call requests the permission, so it
// must precede the start of threads.
const std::string& isa_obstacle(Isa isa);

// Up to this number of rows of x, a weight, or keys and values, are read line by line, in the order of memory: the time
// is then bound by memory, and processors prefetch one stream better than two side by side.
constexpr int kRowsInOrder = 4;

// Whether reading such a stream is faster without software prefetches. AMD processors up to Zen 4 are: their hardware
// prefetcher is slowed by them. A Zen 5 is faster with software prefetches.
bool follows_streams();

// Bytes from a line that is prefetched into the first-level cache to one that is prefetched into the second, for 1 to
// kRowsAhead rows of x. Their products fill the window of instructions, which would otherwise keep enough lines on
// their way: with both prefetches, 4 rows read a seventh (bf16) and a fifth (int8) faster on an Emerald Rapids. 0 on
// processors of other makers, where this is not measured: the second prefetch then has no effect.
constexpr int kRowsAhead = 8;
extern const int64_t far_ahead;

}  // namespace tilerank
