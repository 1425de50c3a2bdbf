// A recorded step: the launches of a piece of Python, replayed by one call. kernels/graph.py states the rules.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/pool.h"

namespace tilerank {

class Graph {
 public:
  // Memory that is allocated during recording comes from `arena`, whose blocks belong to the graph: a recorded address
  // is then never used by another tensor when the graph runs. Graphs that never run at the same time may share one.
  explicit Graph(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}

  const std::shared_ptr<Arena>& arena() const { return arena_; }
  void add(int kernel, const Call& call);
  size_t size() const { return calls_.size(); }

  // Runs the calls [begin, end) in order on the pool's threads. An exception of a kernel ends the run and is rethrown.
  void run(size_t begin, size_t end) const { Pool::instance().run(calls_.data() + begin, end - begin); }

  struct Entry {
    std::string kernel;
    double seconds;  // of the slowest thread
  };
  struct Profile {
    std::vector<Entry> entries;
    double seconds;  // of the whole run
  };
  // Does the same and measures the time of every call.
  Profile profile(size_t begin, size_t end) const;

 private:
  std::shared_ptr<Arena> arena_;
  std::vector<Call> calls_;
  std::vector<int> kernels_;
};

}  // namespace tilerank
