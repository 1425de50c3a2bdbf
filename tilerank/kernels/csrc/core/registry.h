// The kernels by name and rung, and the rung in force.
#pragma once
#include <string>
#include <vector>

#include "core/kernel.h"

namespace tilerank {

// The kernel's number, for launch; throws Error for a name that was never registered.
int kernel_id(const std::string& name);
const std::string& kernel_name(int id);
// The kernel's version for the best rung not above `isa`; throws Error when there is none.
Kernel find_kernel(int id, Isa isa);
// Every name with the rungs it has versions for.
std::vector<std::pair<std::string, std::vector<Isa>>> registered_kernels();

}  // namespace tilerank
