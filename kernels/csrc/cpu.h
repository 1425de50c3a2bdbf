// Which rungs of the ISA ladder this machine can run, and why not.
#pragma once
#include <string>

#include "kernel.h"

namespace tilerank {

const char* isa_name(Isa isa);

// Empty when the rung can run: CPUID, the operating system's XCR0, its permission for tile data (AMX), and a
// computation with known result. The first call asks the system for the permission, so it must come before threads.
const std::string& isa_obstacle(Isa isa);

}  // namespace tilerank
