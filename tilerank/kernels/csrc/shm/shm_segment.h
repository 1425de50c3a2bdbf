// The memory that the ranks of one host share, and how they wait for each other in it.
//
// Laid out by parallel/shm.py, which maps it and passes it to the kernels as a tensor:
//
//   header     4096 bytes (Header)
//   control    for each rank, in pages of its own: 256 bytes per lane (Line)
//   slots      for each rank, in pages of its own: two buffers of `lanes` times `slot_bytes`
//
// Lane t of a rank only ever talks to lane t of the others: a thread works one lane (or several, one after the other),
// so a collective needs no barrier among the threads of a rank.
//
// Every rank makes the same calls, so all of them count the same steps. Writing `sequence = s` says: what I had to
// write for step s is written, and I have read everything of the collectives before this one. A collective uses the
// buffer that the last one did not use; whoever writes first sees to it that all others have entered the last one,
// hence are done with the one before, whose buffer this was.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/kernel.h"

namespace tilerank::shm {

constexpr uint64_t kMagic = 0x314d48534b4e5254;  // "TRNKSHM1"
constexpr size_t kPage = 4096;
constexpr int kMaxRanks = 64;

struct Header {
  uint64_t magic;
  uint32_t ranks, lanes;
  uint64_t slot_bytes;
  // Nonzero when the group is broken: 1 + the rank to blame, and in the upper half why (parallel/watch.py: Reason).
  alignas(64) std::atomic<uint32_t> broken;
};

enum class Reason : uint32_t { gone = 1, left = 2, stuck = 3 };

// In pairs of cache lines, which processors fetch together.
struct Line {
  // What others wait for. They look at nothing else here while they do not sleep.
  alignas(128) std::atomic<uint32_t> sequence;
  // How many others sleep until `sequence` changes.
  alignas(128) std::atomic<uint32_t> sleepers;
  // The core that the owner was on when it entered the last collective.
  std::atomic<int32_t> core;
  // The owner's notes: collectives so far, the first step of the last one, and how waiting has gone (Lane::spin).
  uint32_t count;
  uint32_t last;
  uint32_t doubt, waits, preemptions;
  uint64_t waited_ns;  // for others, in all; parallel/shm.py reads it
};
static_assert(sizeof(Line) == 256 && offsetof(Line, waited_ns) == 160);

// One lane of one rank.
class Lane {
 public:
  // `pauses`: how often a wait looks before it asks whether its core is shared, and sleeps in the kernel if so. Throws
  // Error if the segment is not what it should.
  Lane(const Tensor& segment, int rank, int lane, int64_t pauses, int64_t timeout_ms);

  int ranks() const { return ranks_; }
  int rank() const { return rank_; }
  size_t slot_bytes() const { return slot_bytes_; }
  template <class T = char>
  T* slot(int rank) const {
    return reinterpret_cast<T*>(slot_of(rank));
  }

  // The calls of one collective: enter, then what it takes of the others, then leave.
  void enter();
  void wait_until_free();   // before writing own slot
  void publish();           // my part of this step is done
  void wait_for(int rank);  // until that rank has published the step that I published last
  void wait_for_all();
  void leave();

 private:
  Line& line(int rank) const;
  char* slot_of(int rank) const;
  void wake_sleepers();
  void wait(int rank, uint32_t step);
  void sleep(int rank, uint32_t step);
  bool spin(const Line& theirs, uint32_t step);
  bool crowded(const Line& theirs);
  [[noreturn]] void fail() const;

  char* base_;
  Header* header_;
  int ranks_, rank_, lane_;
  size_t slot_bytes_, control_bytes_;
  int64_t pauses_, timeout_ms_;
  uint32_t step_ = 0, first_ = 0;
  bool told_ = true;  // those who sleep until my last step have been woken
};

// How many lanes share `bytes`: a short message is not worth waking more than one. The same on all ranks.
int active_lanes(const Tensor& segment, int64_t bytes);

}  // namespace tilerank::shm
