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

// A sleeping thread checks at this interval whether the group is intact.
constexpr int64_t kGlanceMs = 10;
// A thread that wakes later than this was itself stopped (Ctrl-Z), and the others with it, so that the rest of the
// interval does not count towards the deadline.
constexpr int64_t kLongestGlanceUs = 1'000'000;
constexpr int64_t kBytesPerLane = 4096;
constexpr uint32_t kMostDoubt = 12, kMany = 16;
// How many times `pauses` a wait spins on a core that no other thread uses: some milliseconds in total.
constexpr int kStretches = 24;

// The word is shared between processes, so FUTEX_PRIVATE_FLAG is not set.
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

Lane::Lane(const Member& member, int lane)
    : base_(member.segment.as<char>()),
      header_(checked(member.segment)),
      ranks_(static_cast<int>(header_->ranks)),
      rank_(static_cast<int>(member.rank)),
      lane_(lane),
      slot_bytes_(header_->slot_bytes),
      control_bytes_(round_up(header_->lanes * sizeof(Line), kPage)),
      pauses_(member.pauses),
      timeout_ms_(member.timeout_ms) {}

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

// Spinning threads see the store at once. Checking for sleepers has to wait until the store is visible, which takes as
// long as a message to another core, so it is deferred until this thread waits or leaves.
void Lane::publish() {
  line(rank_).sequence.store(++step_, std::memory_order_release);
  told_ = false;
}

void Lane::wake_sleepers() {
  if (told_) return;
  told_ = true;
  Line& mine = line(rank_);
  // Either a sleeper was counted before this, or it is counted afterwards, reads the sequence and does not sleep.
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

// Even a core that is reserved for this thread may be shared, possibly with the thread that it waits for, and spinning
// then only delays that thread. Each time that is detected, later waits spin half as long; every kMany-th wait spins
// fully, to detect that spinning helps again. On a core that no other thread uses, a wait may spin much longer: ranks
// reach a sum of a long prompt at different times, and waking a sleeping thread would delay the others.
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

// Whether the awaited thread last ran on this core, or this thread has been preempted since the last call.
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
    // A rank that left after it finished its part is no reason to fail, so check again before giving up.
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
