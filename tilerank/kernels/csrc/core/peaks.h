// The peak rates of this machine, to which everything else is compared. Each measurement starts pinned threads of its
// own and, unless stated otherwise, returns one figure per round. Throws Error if a core cannot be used.
#pragma once
#include <cstdint>
#include <vector>

#include "core/kernel.h"

namespace tilerank {

// Bytes per second that the cores together read from memory. Core i reads the `bytes_per_core` at data[i], which it
// writes first, so that fresh pages are on its own node.
std::vector<double> measure_read(const std::vector<int>& cores, const std::vector<char*>& data, int64_t bytes_per_core);
// The same of reading floats and writing others in their place. Bytes count once as read and once as written.
std::vector<double> measure_update(const std::vector<int>& cores, const std::vector<char*>& data,
                                   int64_t bytes_per_core);
// Bytes per second that the cores together write to `bytes_per_core` of new huge pages each; a single figure.
double measure_first_touch(const std::vector<int>& cores, int64_t bytes_per_core);
// Floating-point (or int8) operations per second of AMX tile products on all the cores; the rung must be usable.
std::vector<double> measure_amx(const std::vector<int>& cores, bool int8);
// Operations per second, on all the cores, of a rung's vector products of float32, bfloat16 or int8. The amx rung has
// the vector products of avx512_bf16. The rung must be usable.
std::vector<double> measure_vectors(const std::vector<int>& cores, Isa isa, DType operands);
// Seconds that a cache line takes from one core to another: half of a round trip.
std::vector<double> measure_core_to_core(int core_a, int core_b);

namespace avx2 {
void read_all(const char* data, int64_t bytes);
void update_all(char* data, int64_t bytes);
// Adds a product to each of twelve sums in every round; returns the number of operations.
double multiply_vectors(int64_t rounds, DType operands);
}  // namespace avx2
namespace avx512 {
void read_all(const char* data, int64_t bytes);
void update_all(char* data, int64_t bytes);
double multiply_vectors(int64_t rounds, DType operands);
}  // namespace avx512
namespace avx512_bf16 {
double multiply_vectors(int64_t rounds, DType operands);
}
namespace amx {
// Runs about `products` tile products; returns the number of operations.
double multiply_tiles(int64_t products, bool int8);
}  // namespace amx

}  // namespace tilerank
