// touch: writes to fresh memory, so that the system maps it. Threads take huge pages in turn, hence equally many.
#ifndef TR_RUNG
#include "core/kernel.h"
#define TR_SOURCE "core/touch.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

// tensors: data[bytes], zeros on pages of its own
static void touch(const Args& args, Team& team) {
  constexpr int64_t kHugePage = 2 << 20, kPage = 4096;
  volatile char* const data = args.tensor(0).as<char>();
  const int64_t bytes = args.tensor(0).size[0];
  for (int64_t page = team.index * kHugePage; page < bytes; page += team.count * kHugePage) {
    const int64_t end = std::min(page + kHugePage, bytes);
    for (int64_t i = page; i < end; i += kPage) data[i] = 0;
  }
}
TR_KERNEL(touch)

}  // namespace tilerank::TR_RUNG
#endif
