// The memory that the ranks of one host share, and how they wait for each other.
//
// parallel/shm.py lays it out, maps it and passes it to the kernels as a tensor:
//
//   header     4096 bytes (Header)
//   control    for each rank, in pages of its own: 256 bytes per lane (Line)
//   slots      for each rank, in pages of its own: two buffers of `lanes` times `slot_bytes`
//
// Lane t of a rank communicates only with lane t of the others. A thread works on one lane (or on several, one after
// the other), so a collective needs no barrier among the threads of a rank.
//
// All ranks make the same calls, so all count the same steps. Storing `sequence = s` means: this lane has written its
// data of step s, and has read all it needs of the collectives before this one. A collective uses the buffer that the
// last one did not use. Before a rank writes to it, it waits until all others have entered the last collective: they
// are then done with the one before, which used this buffer.
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
  // Nonzero if the group is broken: 1 + the rank to blame, and in the upper half the reason (parallel/watch.py:
  // Reason).
  alignas(64) std::atomic<uint32_t> broken;
};

enum class Reason : uint32_t { gone = 1, left = 2, stuck = 3 };

// Aligned to pairs of cache lines, which processors fetch together.
struct Line {
  // The word that others wait for. While they spin they read nothing else here.
  alignas(128) std::atomic<uint32_t> sequence;
  // How many others sleep until `sequence` changes.
  alignas(128) std::atomic<uint32_t> sleepers;
  // The core that the owner was on when it entered the last collective.
  std::atomic<int32_t> core;
  // Used by the owner: number of collectives, first step of the last one, and the state of Lane::spin.
  uint32_t count;
  uint32_t last;
  uint32_t doubt, waits, preemptions;
  uint64_t waited_ns;  // total time of waiting for others; parallel/shm.py reads it
};
static_assert(sizeof(Line) == 256 && offsetof(Line, waited_ns) == 160);

// This rank's access to the segment. pauses: how many pauses a wait spins before it checks whether its core is shared,
// and sleeps if so. timeout_ms: the deadline of a wait.
struct Member {
  const Tensor& segment;
  int64_t rank, pauses, timeout_ms;
};

// A lane of this rank.
class Lane {
 public:
  // Throws Error if the segment is invalid.
  Lane(const Member& member, int lane);

  int ranks() const { return ranks_; }
  int rank() const { return rank_; }
  size_t slot_bytes() const { return slot_bytes_; }
  template <class T = char>
  T* slot(int rank) const {
    return reinterpret_cast<T*>(slot_of(rank));
  }

  // The calls of one collective: enter, then what it takes of the others, then leave.
  void enter();
  void wait_until_free();   // before writing to the own slot
  void publish();           // marks this rank's part of the step as done
  void wait_for(int rank);  // until that rank has published the step that this rank published last
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
  bool told_ = true;  // whether threads that sleep until this rank's last step have been woken
};

// Returns how many lanes share `bytes`: waking several threads for a short message does not pay. Equal on all ranks.
int active_lanes(const Tensor& segment, int64_t bytes);

}  // namespace tilerank::shm
