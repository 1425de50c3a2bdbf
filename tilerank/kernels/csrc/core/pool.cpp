#include "core/pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <cstring>
#include <memory>
#include <utility>

#include "core/arena.h"

namespace tilerank {
namespace {

// About 100 us: longer than the gaps inside a step, but short compared with a time slice of the core.
constexpr int kSpinPauses = 4000;

// Multiplies kSpinPauses between runs: about a millisecond, since another step follows once its tokens are chosen.
constexpr int kSpinsBetweenRuns = 10;

// Up to this number of threads, each thread checks all others in a barrier. With more, only the first checks all, and
// the others wait for the first.
constexpr int kAllLook = 4;

// The phase of a thread that reaches no more barriers, beyond all others.
constexpr uint32_t kNever = 1u << 30;

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, nullptr, nullptr, 0);
}

int64_t now_ns() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

cpu_set_t only(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (core >= 0 && core < CPU_SETSIZE) CPU_SET(core, &set);
  return set;
}

// The arguments of a new thread. `generation` is read before it starts, so that work published meanwhile is not missed.
struct Start {
  Pool* pool;
  int index;
  uint32_t generation;
};

struct Attributes {
  pthread_attr_t value;
  Attributes() { pthread_attr_init(&value); }
  ~Attributes() { pthread_attr_destroy(&value); }
};

// Blocks signals in new threads, which inherit the mask: the thread that runs Python handles signals.
struct SignalsBlocked {
  sigset_t before;
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
};

}  // namespace

void Signal::wake() {
  // Either the sleeper was counted before this load, or it reads the new word afterwards and does not sleep.
  if (sleepers_.load(std::memory_order_seq_cst) != 0) futex(word_, FUTEX_WAKE_PRIVATE, INT_MAX);
}

void Signal::wait_while(uint32_t old, int pauses) {
  for (int i = 0; i < pauses; ++i) {
    if (value() != old) return;
    _mm_pause();
  }
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (value() == old) futex(word_, FUTEX_WAIT_PRIVATE, old);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

void Signal::reset() {
  word_ = 0;
  sleepers_ = 0;
}

void Flag::wake() {
  // Either a sleeper was counted before this, or it is counted afterwards, reads the new word and does not sleep.
  if (sleepers_.fetch_add(0, std::memory_order_acq_rel) != 0) futex(word_, FUTEX_WAKE_PRIVATE, INT_MAX);
}

void Flag::wait_for(uint32_t value, int pauses) {
  for (int i = 0; i < pauses; ++i) {
    if (reached(value)) return;
    _mm_pause();
  }
  if (reached(value)) return;
  sleepers_.fetch_add(1, std::memory_order_acq_rel);
  for (uint32_t seen = word_.load(); static_cast<int32_t>(seen - value) < 0; seen = word_.load()) {
    futex(word_, FUTEX_WAIT_PRIVATE, seen);
  }
  sleepers_.fetch_sub(1, std::memory_order_acq_rel);
}

void Team::barrier() {
  if (count > 1) pool_->barrier(index);
}

void* Team::scratch(size_t bytes) { return pool_->scratch(worker_, bytes); }
const void* Team::scratch_of(int index) const { return pool_->scratch_[index].data; }

Pool& Pool::instance() {
  static Pool* pool = new Pool;  // never destroyed: sleeping workers may outlive static destructors
  return *pool;
}

Pool::Pool() {
  // A child process has only the thread that forked. It must find the pool idle, and starts threads of its own.
  pthread_atfork([] { instance().turn_.lock(); }, [] { instance().turn_.unlock(); }, [] { instance().after_fork(); });
}

void Pool::after_fork() {
  forked_ = forked_ || !workers_.empty();  // a child that forks before its first run has no threads either
  workers_.clear();
  for (Signal* signal : {&generation_, &running_}) signal->reset();
  turn_.unlock();
}

void Pool::start(const std::vector<int>& cores, int threads, bool spin) {
  if (threads < 1) throw Error("start_pool: threads: expected at least 1, found " + std::to_string(threads));
  if (!cores.empty() && cores.size() != static_cast<size_t>(threads)) {
    throw Error("start_pool: cores: expected one core for each of " + std::to_string(threads) + " threads, found " +
                std::to_string(cores.size()));
  }
  std::lock_guard lock(turn_);
  join_threads();
  cores_ = cores;
  pauses_ = spin ? kSpinPauses : 0;
  pin_caller();
  // Freed, because a page lies on the node of the thread that touches it first, and threads may have moved.
  for (const Scratch& scratch : scratch_) {
    if (scratch.data) unmap_pages(scratch.data, scratch.bytes);
  }
  scratch_.assign(threads, {});
  places_ = std::vector<Place>(threads);
  count_ = threads;
  start_threads();
}

void Pool::stop() {
  std::lock_guard lock(turn_);
  join_threads();
  cores_.clear();
  pin_caller();
}

void Pool::pin_caller() {
  if (cores_.empty()) {
    if (unpinned_) sched_setaffinity(0, sizeof(cpu_set_t), &*unpinned_);
    unpinned_.reset();
    return;
  }
  cpu_set_t before;
  sched_getaffinity(0, sizeof(before), &before);
  const cpu_set_t set = only(cores_[0]);
  if (sched_setaffinity(0, sizeof(set), &set) != 0) {
    throw Error("start_pool: cores: expected cores that this process may use, found core " + std::to_string(cores_[0]));
  }
  if (!unpinned_) unpinned_ = before;
}

void Pool::start_threads() {
  stopping_ = false;
  forked_ = false;
  const SignalsBlocked blocked;
  for (int index = 1; index < count_; ++index) {
    Attributes attributes;
    if (!cores_.empty()) {
      const cpu_set_t set = only(cores_[index]);
      pthread_attr_setaffinity_np(&attributes.value, sizeof(set), &set);
    }
    auto start = std::make_unique<Start>(Start{this, index, generation_.value()});
    pthread_t thread;
    const int error = pthread_create(&thread, &attributes.value, thread_main, start.get());
    if (error != 0) {
      const std::string core = cores_.empty() ? "" : " on core " + std::to_string(cores_[index]);
      join_threads();
      cores_.clear();
      pin_caller();
      throw Error("start_pool: expected to start thread " + std::to_string(index) + core + ", found " +
                  std::strerror(error));
    }
    start.release();
    workers_.push_back(thread);
  }
}

void Pool::join_threads() {
  stopping_ = true;
  generation_.add(1);
  generation_.wake();
  for (pthread_t thread : workers_) pthread_join(thread, nullptr);
  workers_.clear();
  count_ = 1;
  forked_ = false;
}

void* Pool::scratch(int index, size_t bytes) {
  Scratch& own = scratch_[index];
  if (own.bytes < bytes) {
    if (own.data) unmap_pages(own.data, own.bytes);
    own = {};
    own = {map_pages(bytes), bytes};
  }
  return own.data;
}

void* Pool::thread_main(void* context) {
  const std::unique_ptr<Start> start(static_cast<Start*>(context));
  Pool& pool = *start->pool;
  pthread_setname_np(pthread_self(), ("tilerank-" + std::to_string(start->index)).c_str());
  for (uint32_t seen = start->generation;;) {
    pool.generation_.wait_while(seen, pool.pauses_ * kSpinsBetweenRuns);
    seen = pool.generation_.value();
    if (pool.stopping_) return nullptr;
    pool.walk(start->index);
    if (pool.running_.add(-1u) == 0) pool.running_.wake();
  }
}

void Pool::run(const Call* calls, size_t n, std::vector<Times>* times) {
  std::lock_guard lock(turn_);
  if (forked_) start_threads();
  if (times) times->assign(n * static_cast<size_t>(count_), {});
  times_ = times ? times->data() : nullptr;
  calls_ = calls;
  num_calls_ = n;
  failure_ = nullptr;
  if (failed_.exchange(false)) places_ = std::vector<Place>(static_cast<size_t>(count_));  // their phases differ
  if (count_ > 1) {
    running_.set(static_cast<uint32_t>(count_ - 1));
    generation_.add(1);
    generation_.wake();
  }
  walk(0);
  while (const uint32_t running = running_.value()) running_.wait_while(running, pauses_);
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void Pool::walk(int index) noexcept {
  Team team(this, index, count_);
  try {
    for (size_t i = 0; i < num_calls_; ++i) {
      if (i != 0) team.barrier();
      if (times_) times_[i * team.count + index].begin = now_ns();
      calls_[i].kernel(calls_[i].args, team);
      if (times_) times_[i * team.count + index].end = now_ns();
    }
  } catch (const Aborted&) {
    arrive(index, kNever);
  } catch (...) {
    {
      std::lock_guard lock(failure_lock_);
      if (!failure_) failure_ = std::current_exception();
    }
    failed_ = true;
    arrive(index, kNever);
  }
}

void Pool::arrive(int index, uint32_t phase) {
  Place& place = places_[index];
  place.phase += phase;
  place.flag.publish(place.phase);
  place.flag.wake();
}

void Pool::barrier(int index) {
  Place& own = places_[index];
  const uint32_t phase = own.phase + 1;
  const bool all_look = count_ <= kAllLook;
  if (index != 0 || all_look) arrive(index, 1);
  for (int other = 0; other < (all_look || index == 0 ? count_.load() : 1); ++other) {
    if (other != index) places_[other].flag.wait_for(phase, pauses_);
  }
  if (index == 0 && !all_look) arrive(index, 1);
  // A thread that fails sets failed_ before it lets the others pass.
  if (failed_) throw Aborted{};
}

}  // namespace tilerank
