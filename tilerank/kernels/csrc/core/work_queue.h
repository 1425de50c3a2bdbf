// A queue from which threads take pieces of work. Cores are not equally fast (neighbours of a virtual machine,
// interrupts, clocks), so with a fixed division the slowest core would determine the time. Only for items whose results
// depend on nothing but the item.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>

#include "core/kernel.h"

namespace tilerank {

class WorkQueue {
 public:
  static constexpr size_t kBytes = 64;  // size of the memory, which all threads share

  explicit WorkQueue(void* memory) : taken_(static_cast<int64_t*>(memory)) {}

  // Empties the queue. Called by one thread, before a barrier.
  void begin() const { *taken_ = 0; }

  // Returns the next of n items, at most `most`. Pieces get smaller towards the end, so that all threads finish at
  // about the same time. An empty range: none is left.
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
