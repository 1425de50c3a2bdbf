// A recorded step: the launches of a piece of Python, run again and again by one call. kernels/graph.py has the rules.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/pool.h"

namespace tilerank {

class Graph {
 public:
  // What is allocated while recording comes from `arena`: its blocks are the graph's own, so that an address which was
  // recorded is nobody else's when the graph runs. Graphs that never run at the same time may share one.
  explicit Graph(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}

  const std::shared_ptr<Arena>& arena() const { return arena_; }
  void add(int kernel, const Call& call);
  size_t size() const { return calls_.size(); }

  // Calls [begin, end) in order on the pool's threads; what a kernel throws ends it and comes out.
  void run(size_t begin, size_t end) const { Pool::instance().run(calls_.data() + begin, end - begin); }

  struct Entry {
    std::string kernel;
    double seconds;  // of the thread that was in it longest
  };
  struct Profile {
    std::vector<Entry> entries;
    double seconds;  // of the whole run
  };
  // The same, watched.
  Profile profile(size_t begin, size_t end) const;

 private:
  std::shared_ptr<Arena> arena_;
  std::vector<Call> calls_;
  std::vector<int> kernels_;
};

}  // namespace tilerank
