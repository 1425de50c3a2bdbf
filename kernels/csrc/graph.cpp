#include "graph.h"

#include <algorithm>
#include <chrono>

#include "registry.h"

namespace tilerank {

void Graph::add(int kernel, const Call& call) {
  calls_.push_back(call);
  kernels_.push_back(kernel);
}

Graph::Profile Graph::profile() const {
  std::vector<Times> times;
  const auto begin = std::chrono::steady_clock::now();
  Pool::instance().run(calls_.data(), calls_.size(), &times);
  Profile profile{{}, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()};
  const size_t threads = calls_.empty() ? 0 : times.size() / calls_.size();
  for (size_t i = 0; i < calls_.size(); ++i) {
    int64_t longest = 0;
    for (size_t t = i * threads; t < (i + 1) * threads; ++t) longest = std::max(longest, times[t].end - times[t].begin);
    profile.entries.push_back({kernel_name(kernels_[i]), static_cast<double>(longest) * 1e-9});
  }
  return profile;
}

}  // namespace tilerank
