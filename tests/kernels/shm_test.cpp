// Collectives in shared memory and recorded graphs under the thread sanitizer: runs one case by name; exit status 0 if
// it holds. See test_threads.py. Ranks are threads here, because the sanitizer watches a single process.
#include <sys/mman.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "core/cpu.h"
#include "core/graph.h"
#include "core/registry.h"
#include "shm/shm_segment.h"

using namespace tilerank;

#define EXPECT(condition)                                                 \
  if (!(condition)) {                                                     \
    std::fprintf(stderr, "line %d: expected %s\n", __LINE__, #condition); \
    std::exit(1);                                                         \
  }

namespace {

constexpr size_t kSlot = 36 << 10;  // small, so that tensors go in pieces, some of which are divided among the ranks
constexpr int64_t kSizes[] = {1, 33, 1000, 5003, 40'009};

struct Segment {
  int ranks, lanes;
  size_t bytes;
  void* data;

  Segment(int ranks, int lanes) : ranks(ranks), lanes(lanes) {
    const size_t control = (static_cast<size_t>(lanes) * sizeof(shm::Line) + 4095) / 4096 * 4096;
    bytes = shm::kPage + static_cast<size_t>(ranks) * (control + 2 * static_cast<size_t>(lanes) * kSlot);
    data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT(data != MAP_FAILED);
    auto* header = static_cast<shm::Header*>(data);
    header->magic = shm::kMagic;
    header->ranks = static_cast<uint32_t>(ranks);
    header->lanes = static_cast<uint32_t>(lanes);
    header->slot_bytes = kSlot;
  }
  ~Segment() { munmap(data, bytes); }
  Tensor tensor() const { return {data, DType::u8, 1, {static_cast<int64_t>(bytes)}, {1}}; }
  shm::Header* header() const { return static_cast<shm::Header*>(data); }
};

template <class T>
Tensor vector_of(std::vector<T>& values, DType dtype) {
  return {values.data(), dtype, 1, {static_cast<int64_t>(values.size())}, {1}};
}

Tensor matrix_of(std::vector<float>& values, int64_t rows, int64_t columns) {
  return {values.data(), DType::f32, 2, {rows, columns}, {columns, 1}};
}

// One rank, whose threads make the calls that all ranks make, in the same order.
struct Rank {
  const Segment& segment;
  int rank;
  int64_t pauses, timeout_ms;

  // Runs the kernel on all of the rank's threads at once, as the pool would. inputs, numbers: those before the segment.
  void call(const char* kernel, std::vector<Tensor> inputs, std::vector<Tensor> outputs = {},
            std::vector<int64_t> numbers = {}, double real = 0) const {
    Args args;
    inputs.push_back(segment.tensor());
    for (const auto* tensors : {&inputs, &outputs}) {
      for (const Tensor& tensor : *tensors) args.tensors[args.num_tensors++] = tensor;
    }
    numbers.insert(numbers.end(), {int64_t{rank}, pauses, timeout_ms});
    for (int64_t i : numbers) args.ints[args.num_ints++] = i;
    args.floats[args.num_floats++] = real;
    static const Isa isa = isa_obstacle(Isa::avx512).empty() ? Isa::avx512 : Isa::avx2;
    const Kernel run = find_kernel(kernel_id(kernel), isa);
    std::vector<std::thread> others;
    for (int index = 1; index < segment.lanes; ++index) {
      others.emplace_back([&, index] {
        Team team(nullptr, index, segment.lanes);
        run(args, team);
      });
    }
    Team team(nullptr, 0, segment.lanes);
    run(args, team);
    for (std::thread& other : others) other.join();
  }
};

void on_all_ranks(const Segment& segment, int64_t pauses, const std::function<void(const Rank&)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < segment.ranks; ++rank) {
    threads.emplace_back([&, rank] { body({segment, rank, pauses, 60'000}); });
  }
  for (std::thread& thread : threads) thread.join();
}

// Small integers, whose sums are exact in any order and dtype.
float value(int rank, int64_t i, int round) { return static_cast<float>((i * 7 + rank * 3 + round) % 11); }

void sums(const Rank& self, int round) {
  for (const int64_t n : kSizes) {
    std::vector<float> x(static_cast<size_t>(n));
    std::vector<uint16_t> short_x(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
      x[i] = value(self.rank, i, round);
      uint32_t bits;
      std::memcpy(&bits, &x[i], 4);
      short_x[i] = static_cast<uint16_t>(bits >> 16);
    }
    self.call("shm_all_reduce", {vector_of(x, DType::f32)});
    self.call("shm_all_reduce", {vector_of(short_x, DType::bf16)});
    for (int64_t i = 0; i < n; ++i) {
      float expected = 0, found;
      for (int rank = 0; rank < self.segment.ranks; ++rank) expected += value(rank, i, round);
      const uint32_t bits = static_cast<uint32_t>(short_x[i]) << 16;
      std::memcpy(&found, &bits, 4);
      EXPECT(x[i] == expected);
      EXPECT(found == expected);
    }
  }
}

// The second norm continues with the residual that the first one left.
void norms(const Rank& self, int round) {
  const int64_t rows = 45, width = 500, n = rows * width;
  std::vector<float> residual(n), weight(width, 2.0f), x(n), out(n), total(n);
  for (int time = 0; time < 2; ++time) {
    for (int64_t i = 0; i < n; ++i) {
      x[i] = value(self.rank, i, round + 5 * time);
      for (int rank = 0; rank < self.segment.ranks; ++rank) total[i] += value(rank, i, round + 5 * time);
    }
    self.call("shm_add_rms_norm",
              {matrix_of(x, rows, width), matrix_of(residual, rows, width), vector_of(weight, DType::f32), Tensor{},
               Tensor{}},
              {matrix_of(out, rows, width)}, {0, 0}, 1e-5);
    for (int64_t row = 0; row < rows; ++row) {
      double squares = 0;
      for (int64_t i = row * width; i < (row + 1) * width; ++i) squares += double{total[i]} * total[i];
      const double scale = 2 / std::sqrt(squares / width + 1e-5);
      for (int64_t i = row * width; i < (row + 1) * width; ++i) EXPECT(std::abs(out[i] - total[i] * scale) < 1e-4);
    }
  }
}

void moves(const Rank& self, int round) {
  const int ranks = self.segment.ranks;
  for (const int64_t n : kSizes) {
    std::vector<uint8_t> x(static_cast<size_t>(n)), everyone(static_cast<size_t>(n * ranks));
    for (int64_t i = 0; i < n; ++i) x[i] = static_cast<uint8_t>(value(self.rank, i, round));
    Tensor all = vector_of(everyone, DType::u8);
    all = {all.data, DType::u8, 2, {ranks, n}, {n, 1}};
    self.call("shm_all_gather", {vector_of(x, DType::u8)}, {all});
    for (int64_t i = 0; i < n * ranks; ++i) EXPECT(everyone[i] == value(static_cast<int>(i / n), i % n, round));
    const int root = round % ranks;
    self.call("shm_broadcast", {vector_of(x, DType::u8)}, {}, {root});
    for (int64_t i = 0; i < n; ++i) EXPECT(x[i] == value(root, i, round));
  }
  // Rank r has r columns less than the room for them.
  const int64_t rows = 3, width = 1201;
  std::vector<float> part(rows * width);
  std::vector<int64_t> starts{0};
  for (int rank = 0; rank < ranks; ++rank) starts.push_back(starts.back() + width - rank);
  std::vector<float> whole(static_cast<size_t>(rows * starts.back()));
  for (int64_t i = 0; i < rows * width; ++i) part[i] = value(self.rank, i, round);
  self.call("shm_gather_columns", {matrix_of(part, rows, width), vector_of(starts, DType::i64)},
            {matrix_of(whole, rows, starts.back())});
  for (int64_t row = 0; row < rows; ++row) {
    for (int rank = 0; rank < ranks; ++rank) {
      for (int64_t column = 0; column < width - rank; ++column) {
        EXPECT(whole[row * starts.back() + starts[rank] + column] == value(rank, row * width + column, round));
      }
    }
  }
}

void collectives(int ranks, int lanes, int64_t pauses) {
  const Segment segment(ranks, lanes);
  on_all_ranks(segment, pauses, [](const Rank& self) {
    for (int round = 0; round < 4; ++round) {
      // Ranks get out of step: no rank may overwrite what another has not read yet.
      if ((round + self.rank) % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      sums(self, round);
      norms(self, round);
      moves(self, round);
    }
  });
}

// A rank stays away: the others fail after their deadline, or as soon as the group is marked as broken.
void lost(int ranks, int64_t pauses, bool told) {
  const Segment segment(ranks, 1);
  std::atomic<int> failures{0};
  std::thread watcher([&] {
    if (!told) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    segment.header()->broken.store(1u << 16 | static_cast<uint32_t>(ranks));
  });
  on_all_ranks(segment, pauses, [&](const Rank& self) {
    if (self.rank == ranks - 1) return;
    const Rank hasty{self.segment, self.rank, self.pauses, told ? 60'000 : 100};
    std::vector<float> x(100);
    try {
      hasty.call("shm_all_reduce", {vector_of(x, DType::f32)});
    } catch (const Error& error) {
      const std::string said = "rank " + std::to_string(ranks - 1) + " of this host is lost";
      // A rank that waits for a waiting rank may blame that one; parallel/watch.py corrects this.
      EXPECT(!told || std::strstr(error.what(), said.c_str()));
      ++failures;
    }
  });
  watcher.join();
  EXPECT(failures == ranks - 1);
}

void add_one(const Args& args, Team& team) {
  // Reversed shares: a launch reads what another thread wrote in the launch before.
  const Tensor& x = args.tensors[0];
  const Team mirrored(nullptr, team.count - 1 - team.index, team.count);
  const auto [begin, end] = (args.ints[0] % 2 ? mirrored : team).share(x.size[0]);
  for (int64_t i = begin; i < end; ++i) ++x.as<int64_t>()[i];
}

void refuse(const Args& args, Team& team) {
  if (*args.tensors[0].as<int64_t>() < 0 && team.index == team.count - 1) throw Error("negative");
}

// Many launches, replayed as a whole, in parts and with profiling. A launch that fails ends a run; the next run works.
void graphs(int threads, bool spin) {
  register_kernel("add_one", Isa::avx2, add_one);
  register_kernel("refuse", Isa::avx2, refuse);
  Pool::instance().start({}, threads, spin);
  std::vector<int64_t> x(1000);
  Graph graph(std::make_shared<Arena>(true));
  Call call{add_one, {}};
  call.args.tensors[0] = vector_of(x, DType::i64);
  for (int i = 0; i < 200; ++i) {
    call.args.ints[0] = i;
    call.kernel = i == 100 ? refuse : add_one;
    graph.add(kernel_id(i == 100 ? "refuse" : "add_one"), call);
  }
  for (int run = 0; run < 20; ++run) {
    graph.run(0, 50);
    graph.run(50, graph.size());
    const Graph::Profile profile = graph.profile(0, graph.size());
    EXPECT(profile.entries.size() == 200 && profile.entries[100].kernel == "refuse");
  }
  for (int64_t value : x) EXPECT(value == 20 * 2 * 199);
  x[0] = -1'000'000;
  bool failed = false;
  try {
    graph.run(0, graph.size());
  } catch (const Error& error) {
    failed = std::strcmp(error.what(), "negative") == 0;
  }
  EXPECT(failed);
  for (int64_t i = 1; i < 1000; ++i) EXPECT(x[i] == 20 * 2 * 199 + 100);
  graph.run(101, graph.size());
  EXPECT(x[999] == 20 * 2 * 199 + 199);
  Pool::instance().stop();
}

}  // namespace

int main(int argc, char** argv) {
  EXPECT(argc == 5);
  const std::string name = argv[1];
  const int ranks = std::atoi(argv[2]), threads = std::atoi(argv[3]);
  const bool spin = std::strcmp(argv[4], "spin") == 0;
  const int64_t pauses = spin ? 4000 : 0;
  if (name == "collectives") {
    collectives(ranks, threads, pauses);
  } else if (name == "lost") {
    lost(ranks, pauses, false);
    lost(ranks, pauses, true);
  } else if (name == "graphs") {
    graphs(threads, spin);
  } else {
    return 2;
  }
}
