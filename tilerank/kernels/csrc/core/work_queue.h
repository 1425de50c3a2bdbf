// Work taken in pieces to threads as they come for more: cores are not equally fast (neighbours of a virtual machine,
// interrupts, clocks), and of two halves cut beforehand the slower one decides. Only for items whose results depend on
// nothing but the item.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>

#include "core/kernel.h"

namespace tilerank {

class WorkQueue {
 public:
  static constexpr size_t kBytes = 64;  // of the memory, which all threads share

  explicit WorkQueue(void* memory) : taken_(static_cast<int64_t*>(memory)) {}

  // By one thread, before a barrier.
  void begin() const { *taken_ = 0; }

  // The next of n items, at most `most`; fewer towards the end, so that all threads end together. Empty: none is left.
  Range next(int64_t n, int64_t most, const Team& team) const {
    const std::atomic_ref taken(*taken_);
    int64_t first = taken.load(std::memory_order_relaxed), count;
    do {
      count = std::min(n - first, std::clamp<int64_t>((n - first) / (2 * team.count), 1, most));
    } while (count > 0 && !taken.compare_exchange_weak(first, first + count, std::memory_order_relaxed));
    return {first, first + count};
  }

 private:
  int64_t* const taken_;
};

}  // namespace tilerank
