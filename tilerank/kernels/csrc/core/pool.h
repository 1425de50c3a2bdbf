// The team of pinned threads; a process has one.
#pragma once
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <vector>

#include "core/kernel.h"

namespace tilerank {

// A kernel with its arguments. A recorded graph is a vector of calls.
struct Call {
  Kernel kernel;
  Args args;
};

// When a thread began and ended a call, in nanoseconds of the steady clock.
struct Times {
  int64_t begin, end;
};

// A word that threads wait on. They spin first, if allowed, then sleep in the kernel (futex).
class Signal {
 public:
  uint32_t value() const { return word_.load(std::memory_order_seq_cst); }
  void set(uint32_t value) { word_.store(value, std::memory_order_seq_cst); }
  uint32_t add(uint32_t n) { return word_.fetch_add(n, std::memory_order_seq_cst) + n; }  // the new value
  void wake();                                                                            // after set or add
  void wait_while(uint32_t old, int pauses);
  void reset();  // when no thread waits

 private:
  alignas(64) std::atomic<uint32_t> word_{0};
  std::atomic<uint32_t> sleepers_{0};
};

// The progress of one thread, which other threads wait for.
class Flag {
 public:
  void publish(uint32_t value) { word_.store(value, std::memory_order_release); }
  // Wakes sleeping threads. Separate from publish, because it takes as long as a message to another core.
  void wake();
  void wait_for(uint32_t value, int pauses);  // returns at `value` or a later one

 private:
  bool reached(uint32_t value) const {
    return static_cast<int32_t>(word_.load(std::memory_order_acquire) - value) >= 0;
  }

  // Aligned to pairs of cache lines, which processors fetch together.
  alignas(128) std::atomic<uint32_t> word_{0};
  alignas(128) std::atomic<uint32_t> sleepers_{0};
};

class Pool {
 public:
  static Pool& instance();

  // Ends the old threads and starts `threads` - 1 new ones; the thread that calls run() is worker 0. `cores` is empty
  // (not pinned) or has one core per worker, and the calling thread is pinned to the first. With `spin`, a waiting
  // thread spins for a while before it sleeps. Without, it sleeps at once, for more threads than cores. Throws Error.
  void start(const std::vector<int>& cores, int threads, bool spin);
  void stop();  // ends all threads but the calling one
  int threads() const { return count_; }

  // Runs the calls in order on all threads, with a barrier after each. The first exception of any thread is rethrown
  // here. If several threads call run(), they take turns. `times` gets a row for every call with an entry for every
  // thread.
  void run(const Call* calls, size_t n, std::vector<Times>* times = nullptr);

 private:
  friend class Team;
  struct Aborted {};  // thrown by a barrier after another thread of the team has failed

  Pool();
  void start_threads();
  void join_threads();
  void pin_caller();
  static void* thread_main(void* context);
  void walk(int index) noexcept;
  void barrier(int index);
  void arrive(int index, uint32_t phase);
  void* scratch(int index, size_t bytes);
  void after_fork();

  std::mutex turn_;
  struct Scratch {
    void* data = nullptr;
    size_t bytes = 0;
  };

  std::vector<pthread_t> workers_;
  // One per thread of the team.
  std::vector<Scratch> scratch_{1};
  struct Place {
    Flag flag;
    uint32_t phase = 0;  // number of barriers that the thread has reached; only the thread uses it
  };
  std::vector<Place> places_{1};
  std::vector<int> cores_;
  std::optional<cpu_set_t> unpinned_;  // the caller's affinity before it was pinned
  std::atomic<int> count_ = 1;
  int pauses_ = 0;
  bool forked_ = false;  // in a child process: the threads are gone, and the next run starts new ones

  const Call* calls_ = nullptr;
  size_t num_calls_ = 0;
  Times* times_ = nullptr;
  bool stopping_ = false;
  Signal generation_;  // changes when there is work
  Signal running_;     // number of workers that have not finished the work
  std::atomic<bool> failed_{false};
  std::mutex failure_lock_;
  std::exception_ptr failure_;
};

}  // namespace tilerank
