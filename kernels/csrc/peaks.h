// What this machine can do at best, to measure everything else against. Each measurement starts pinned threads of its
// own and returns one figure per round but where it says so; throws Error when a core cannot be used.
#pragma once
#include <cstdint>
#include <vector>

namespace tilerank {

// Bytes per second that the cores together read from memory, each out of `bytes_per_core` of its own huge pages.
std::vector<double> measure_read(const std::vector<int>& cores, int64_t bytes_per_core);
// Bytes per second that the cores together write into `bytes_per_core` of new huge pages each; one figure.
double measure_first_touch(const std::vector<int>& cores, int64_t bytes_per_core);
// Floating-point (or int8) operations per second of AMX tile products on all the cores; the rung must be usable.
std::vector<double> measure_amx(const std::vector<int>& cores, bool int8);
// Seconds that a cache line takes from one core to another, half of a round trip.
std::vector<double> measure_core_to_core(int core_a, int core_b);

namespace avx2 {
void read_all(const char* data, int64_t bytes);
}
namespace avx512 {
void read_all(const char* data, int64_t bytes);
}
namespace amx {
// Runs about `products` tile products; returns the operations done.
double multiply_tiles(int64_t products, bool int8);
}  // namespace amx

}  // namespace tilerank
