// touch: writes one byte of every `step` to fresh memory, so that the system maps it. Threads take huge pages in turn,
// hence equally many.
#ifndef TR_RUNG
#include "core/entry.h"
#define TR_SOURCE "core/touch.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

TR_ENTRY(touch, Team& team, const Tensor& data, int64_t step) {
  constexpr int64_t kHugePage = 2 << 20;
  volatile char* const first = data.as<char>();
  const int64_t bytes = data.size[0];
  for (int64_t page = team.index * kHugePage; page < bytes; page += team.count * kHugePage) {
    const int64_t end = std::min(page + kHugePage, bytes);
    for (int64_t i = page; i < end; i += step) first[i] = 0;
  }
}

}  // namespace tilerank::TR_RUNG
#endif
