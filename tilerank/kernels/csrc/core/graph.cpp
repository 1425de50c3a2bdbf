#include "core/graph.h"

#include <algorithm>
#include <chrono>

#include "core/registry.h"

namespace tilerank {

void Graph::add(int kernel, const Call& call) {
  calls_.push_back(call);
  kernels_.push_back(kernel);
}

Graph::Profile Graph::profile(size_t first, size_t last) const {
  std::vector<Times> times;
  const auto begin = std::chrono::steady_clock::now();
  Pool::instance().run(calls_.data() + first, last - first, &times);
  Profile profile{{}, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()};
  const size_t threads = first == last ? 0 : times.size() / (last - first);
  for (size_t i = 0; i < last - first; ++i) {
    int64_t longest = 0;
    for (size_t t = i * threads; t < (i + 1) * threads; ++t) longest = std::max(longest, times[t].end - times[t].begin);
    profile.entries.push_back({kernel_name(kernels_[first + i]), static_cast<double>(longest) * 1e-9});
  }
  return profile;
}

}  // namespace tilerank
