#include "shm/shm_segment.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <string>
#include <utility>

namespace tilerank::shm {
namespace {

// A sleeper looks this often whether the group is still whole.
constexpr int64_t kGlanceMs = 10;
// Who looks up later than this was stopped itself (Ctrl-Z), and the others with it: that time is nobody's fault.
constexpr int64_t kLongestGlanceUs = 1'000'000;
constexpr int64_t kBytesPerLane = 4096;
constexpr uint32_t kMostDoubt = 12, kMany = 16;
// Of so many pauses as a wait is given, on a core that nobody else wants: some milliseconds in all.
constexpr int kStretches = 24;

// Shared between processes, so without FUTEX_PRIVATE_FLAG.
void futex_wait(std::atomic<uint32_t>& word, uint32_t value, int64_t ms) {
  const timespec limit{ms / 1000, ms % 1000 * 1'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &limit, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

int64_t now_us() { return now_ns() / 1000; }

bool reached(const Line& line, uint32_t step) {
  return static_cast<int32_t>(line.sequence.load(std::memory_order_seq_cst) - step) >= 0;
}

constexpr size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

Header* checked(const Tensor& segment) {
  auto* header = segment.as<Header>();
  if (segment.size[0] < static_cast<int64_t>(kPage) || header->magic != kMagic) {
    throw Error("the shared memory of this host's ranks has no header");
  }
  const size_t control = header->ranks * round_up(header->lanes * sizeof(Line), kPage);
  const size_t slots = header->ranks * 2 * header->lanes * header->slot_bytes;
  if (header->ranks > kMaxRanks || static_cast<size_t>(segment.size[0]) != kPage + control + slots) {
    throw Error("the shared memory of this host's ranks has " + std::to_string(segment.size[0]) +
                " bytes, its header needs " + std::to_string(kPage + control + slots));
  }
  return header;
}

}  // namespace

int active_lanes(const Tensor& segment, int64_t bytes) {
  const int64_t lanes = segment.as<Header>()->lanes;
  return static_cast<int>(std::clamp<int64_t>(bytes / kBytesPerLane, 1, lanes));
}

Lane::Lane(const Tensor& segment, int rank, int lane, int64_t pauses, int64_t timeout_ms)
    : base_(segment.as<char>()),
      header_(checked(segment)),
      ranks_(static_cast<int>(header_->ranks)),
      rank_(rank),
      lane_(lane),
      slot_bytes_(header_->slot_bytes),
      control_bytes_(round_up(header_->lanes * sizeof(Line), kPage)),
      pauses_(pauses),
      timeout_ms_(timeout_ms) {}

Line& Lane::line(int rank) const {
  return reinterpret_cast<Line*>(base_ + kPage + static_cast<size_t>(rank) * control_bytes_)[lane_];
}

char* Lane::slot_of(int rank) const {
  const size_t buffer = header_->lanes * slot_bytes_;
  const size_t parity = line(rank_).count & 1;
  return base_ + kPage + static_cast<size_t>(ranks_) * control_bytes_ +
         (static_cast<size_t>(rank) * 2 + parity) * buffer + static_cast<size_t>(lane_) * slot_bytes_;
}

void Lane::enter() {
  Line& mine = line(rank_);
  mine.core.store(sched_getcpu(), std::memory_order_relaxed);
  step_ = mine.sequence.load(std::memory_order_relaxed);
  first_ = step_ + 1;
}

void Lane::wait_until_free() {
  for (int other = 0; other < ranks_; ++other) wait(other, line(rank_).last);
}

// Whoever spins sees it at once. Looking for sleepers needs the store to be out, which takes as long as a message to
// another core; that is put off until there is nothing better to do.
void Lane::publish() {
  line(rank_).sequence.store(++step_, std::memory_order_release);
  told_ = false;
}

void Lane::wake_sleepers() {
  if (told_) return;
  told_ = true;
  Line& mine = line(rank_);
  // Either a sleeper counted itself before this, or it counts itself after it, sees the sequence and does not sleep.
  if (mine.sleepers.fetch_add(0, std::memory_order_acq_rel) != 0) futex_wake_all(mine.sequence);
}

void Lane::wait_for(int rank) { wait(rank, step_); }

void Lane::wait_for_all() {
  for (int distance = 1; distance < ranks_; ++distance) wait((rank_ + distance) % ranks_, step_);
}

void Lane::leave() {
  wake_sleepers();
  Line& mine = line(rank_);
  mine.last = first_;
  ++mine.count;
}

void Lane::wait(int rank, uint32_t step) {
  const Line& theirs = line(rank);
  if (reached(theirs, step)) return;
  const int64_t began = now_ns();
  wake_sleepers();
  if (pauses_ == 0 || !spin(theirs, step)) sleep(rank, step);
  line(rank_).waited_ns += static_cast<uint64_t>(now_ns() - began);
}

// A core that was promised to this thread alone may be shared after all, maybe with the very thread it waits for: then
// no spinning helps. Where it was found to be, spin half as long, and all of it once in a while, to find out that it
// helps again. A core that nobody else wants may spin much longer: ranks do not come to a sum of a long prompt at the
// same time, and who sleeps then keeps the others waiting until it is awake.
bool Lane::spin(const Line& theirs, uint32_t step) {
  Line& mine = line(rank_);
  const bool fully = mine.doubt == 0 || ++mine.waits % kMany == 0;
  for (int stretch = 0; stretch < kStretches; ++stretch) {
    const int64_t pauses = fully ? pauses_ : pauses_ >> mine.doubt;
    for (int64_t i = 0; i < pauses; ++i) {
      if (reached(theirs, step)) {
        if (mine.doubt > 0) mine.doubt = fully ? 0 : mine.doubt - 1;
        return true;
      }
      _mm_pause();
    }
    if (crowded(theirs)) {
      mine.doubt = std::min(mine.doubt + 1, kMostDoubt);
      return false;
    }
  }
  return false;
}

// Is the awaited thread on this core, or has another one taken it from this thread since it last asked?
bool Lane::crowded(const Line& theirs) {
  Line& mine = line(rank_);
  rusage usage;
  getrusage(RUSAGE_THREAD, &usage);
  const auto before = std::exchange(mine.preemptions, static_cast<uint32_t>(usage.ru_nivcsw));
  return mine.preemptions != before || theirs.core.load(std::memory_order_relaxed) == sched_getcpu();
}

void Lane::sleep(int rank, uint32_t step) {
  Line& theirs = line(rank);
  int64_t last = now_us(), waited = 0;
  theirs.sleepers.fetch_add(1, std::memory_order_seq_cst);
  bool whole = true;
  while (!reached(theirs, step)) {
    // A rank that broke off afterwards has still done its part, so look again before giving up.
    if (header_->broken.load(std::memory_order_acquire) != 0) {
      whole = reached(theirs, step);
      break;
    }
    const int64_t now = now_us();
    waited += std::min(now - std::exchange(last, now), kLongestGlanceUs);
    if (waited >= timeout_ms_ * 1000) {
      uint32_t expected = 0;
      const uint32_t stuck = static_cast<uint32_t>(Reason::stuck) << 16 | static_cast<uint32_t>(rank + 1);
      header_->broken.compare_exchange_strong(expected, stuck);
      whole = false;
      break;
    }
    const uint32_t seen = theirs.sequence.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - step) < 0) futex_wait(theirs.sequence, seen, std::min(kGlanceMs, timeout_ms_));
  }
  theirs.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  if (!whole) fail();
}

void Lane::fail() const {
  const uint32_t broken = header_->broken.load(std::memory_order_acquire);
  throw Error("a collective in shared memory was given up: rank " + std::to_string((broken & 0xffff) - 1) +
              " of this host is lost");
}

}  // namespace tilerank::shm
