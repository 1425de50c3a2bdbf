// The kernels by name and rung.
#pragma once
#include <string>
#include <vector>

#include "core/kernel.h"

namespace tilerank {

// Returns the kernel's number, for launch. Throws Error for a name that is not registered.
int kernel_id(const std::string& name);
const std::string& kernel_name(int id);
const std::string& kernel_parameters(int id);  // as its source has them
// Returns the kernel's version for the best rung up to `isa`. Throws Error if there is none.
Kernel find_kernel(int id, Isa isa);
// Sets the rung up to which `chosen_kernel` goes for a kernel. Graphs that were recorded before keep their versions.
void choose_isa(int id, Isa isa);
Kernel chosen_kernel(int id);
// Returns every name with the rungs that have a version of it.
std::vector<std::pair<std::string, std::vector<Isa>>> registered_kernels();

}  // namespace tilerank
