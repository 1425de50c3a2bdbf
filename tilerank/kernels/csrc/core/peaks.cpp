#ifndef TR_RUNG
#include "core/peaks.h"

#include <linux/mempolicy.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "core/arena.h"
#include "core/cpu.h"

#undef TR_LEFT_OUT  // what follows is called by the name of its rung
#define TR_SOURCE "core/peaks.cpp"
#include "simd/foreach_isa.h"

namespace tilerank {
namespace {

constexpr int kRounds = 11;

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

struct Worker {
  std::function<void(int)> body;
  int index;
};

// Runs body(i) on a thread pinned to cores[i], for all cores. Its memory comes from its own node, even if the process
// is bound to others.
void run_pinned(const std::vector<int>& cores, const std::function<void(int)>& body) {
  std::vector<pthread_t> threads;
  std::vector<Worker> workers;
  workers.reserve(cores.size());
  int refused = -1;
  std::atomic<bool> cancelled{false}, started{false};
  for (const int core : cores) {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (core >= 0 && core < CPU_SETSIZE) CPU_SET(core, &set);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setaffinity_np(&attributes, sizeof(set), &set);
    const auto gated = [&](int index) {
      started.wait(false);
      syscall(SYS_set_mempolicy, MPOL_DEFAULT, nullptr, 0);  // may fail; then the process has no policy either
      if (!cancelled) body(index);
    };
    workers.push_back({gated, static_cast<int>(threads.size())});
    pthread_t thread;
    const int error = pthread_create(
        &thread, &attributes,
        [](void* context) -> void* {
          const Worker& worker = *static_cast<Worker*>(context);
          worker.body(worker.index);
          return nullptr;
        },
        &workers.back());
    pthread_attr_destroy(&attributes);
    if (error != 0) {
      refused = core;
      break;
    }
    threads.push_back(thread);
  }
  cancelled = refused != -1 || threads.size() != cores.size();
  started = true;
  started.notify_all();
  for (const pthread_t thread : threads) pthread_join(thread, nullptr);
  if (cancelled) throw Error("peaks: expected a core this process may use, found " + std::to_string(refused));
}

// Returns the rates of kRounds rounds in which all cores work at once; work(i) returns the amount of work of core i.
std::vector<double> rates(const std::vector<int>& cores, const std::function<double(int)>& work) {
  std::vector<double> done(cores.size()), rounds;
  std::barrier<> together(static_cast<ptrdiff_t>(cores.size()));
  run_pinned(cores, [&](int index) {
    work(index);  // first touch, and time for the clock frequency to settle under this work
    for (int round = 0; round < kRounds; ++round) {
      together.arrive_and_wait();
      const auto start = Clock::now();
      done[index] = work(index);
      together.arrive_and_wait();
      if (index == 0) {
        double total = 0;
        for (const double part : done) total += part;
        rounds.push_back(total / seconds_since(start));
      }
    }
  });
  return rounds;
}

// Returns the rates at which `pass` goes over the `bytes_per_core` at data[i] on core i, which writes them first.
template <class Pass>
std::vector<double> memory_rates(const std::vector<int>& cores, const std::vector<char*>& data, int64_t bytes_per_core,
                                 const Pass& pass) {
  std::vector<char> touched(cores.size());
  return rates(cores, [&](int index) {
    if (!touched[index]) std::memset(data[index], touched[index] = 1, static_cast<size_t>(bytes_per_core));
    pass(data[index], bytes_per_core);
    return static_cast<double>(bytes_per_core);
  });
}

bool streams_avx512() {
  if (!isa_obstacle(Isa::avx2).empty()) throw Error("memory rates are not available: " + isa_obstacle(Isa::avx2));
  return isa_obstacle(Isa::avx512).empty();
}

}  // namespace

std::vector<double> measure_read(const std::vector<int>& cores, const std::vector<char*>& data,
                                 int64_t bytes_per_core) {
  return memory_rates(cores, data, bytes_per_core, streams_avx512() ? avx512::read_all : avx2::read_all);
}

std::vector<double> measure_update(const std::vector<int>& cores, const std::vector<char*>& data,
                                   int64_t bytes_per_core) {
  std::vector<double> rounds =
      memory_rates(cores, data, bytes_per_core, streams_avx512() ? avx512::update_all : avx2::update_all);
  for (double& rate : rounds) rate *= 2;
  return rounds;
}

double measure_first_touch(const std::vector<int>& cores, int64_t bytes_per_core) {
  const size_t bytes = static_cast<size_t>(bytes_per_core), total = bytes * cores.size();
  const auto give_back = [total](char* data) { unmap_pages(data, total); };
  const std::unique_ptr<char, decltype(give_back)> data(static_cast<char*>(map_pages(total)), give_back);
  const auto start = Clock::now();
  run_pinned(cores, [&](int index) { std::memset(data.get() + static_cast<size_t>(index) * bytes, 1, bytes); });
  return static_cast<double>(total) / seconds_since(start);
}

std::vector<double> measure_amx(const std::vector<int>& cores, bool int8) {
  if (kEmulatesAmx) throw Error("AMX is not available: this build of the core emulates its tiles, for tests");
  if (!isa_obstacle(Isa::amx).empty()) throw Error("AMX is not available: " + isa_obstacle(Isa::amx));
  constexpr int64_t kProducts = 1 << 20;  // about 6 ms
  return rates(cores, [&](int) { return amx::multiply_tiles(kProducts, int8); });
}

std::vector<double> measure_vectors(const std::vector<int>& cores, Isa isa, DType operands) {
  if (isa == Isa::reference) throw Error("vector products are not available: kernels run in plain torch");
  if (!isa_obstacle(isa).empty()) throw Error("vector products are not available: " + isa_obstacle(isa));
  const auto multiply = isa == Isa::avx2     ? avx2::multiply_vectors
                        : isa == Isa::avx512 ? avx512::multiply_vectors
                                             : avx512_bf16::multiply_vectors;
  constexpr int64_t kProducts = 2 << 20;  // per sum: 5 to 10 ms
  return rates(cores, [&](int) { return multiply(kProducts, operands); });
}

std::vector<double> measure_core_to_core(int core_a, int core_b) {
  constexpr uint32_t kRoundTrips = 200;  // per figure
  constexpr int kFigures = 101;
  constexpr double kLimit = 2.0;  // seconds: if a core is busy with other work, a round trip takes time slices
  struct alignas(128) Line {
    std::atomic<uint32_t> word{0};
  } there, back;
  constexpr uint32_t kStop = ~0u;
  std::vector<double> figures;
  run_pinned({core_a, core_b}, [&](int index) {
    if (index == 1) {
      for (uint32_t seen = 0;;) {
        const uint32_t word = there.word.load(std::memory_order_acquire);
        if (word == kStop) return;
        if (word != seen) back.word.store(seen = word, std::memory_order_release);
      }
    }
    uint32_t count = 0;
    const auto begin = Clock::now();
    while (figures.size() < kFigures && (figures.empty() || seconds_since(begin) < kLimit)) {
      const auto start = Clock::now();
      for (uint32_t i = 0; i < kRoundTrips; ++i) {
        there.word.store(++count, std::memory_order_release);
        while (back.word.load(std::memory_order_acquire) != count) {
        }
      }
      figures.push_back(seconds_since(start) / kRoundTrips / 2);
    }
    there.word.store(kStop, std::memory_order_release);
  });
  return figures;
}

}  // namespace tilerank

#else

namespace tilerank::TR_RUNG {

// Prefetches what is read after a line: into the first-level cache, and further ahead into the second (cpu.h).
static inline void prefetch_after(const char* line) {
  constexpr int64_t kAhead = 2048;
  _mm_prefetch(line + kAhead, _MM_HINT_T0);
  _mm_prefetch(line + kAhead + far_ahead, _MM_HINT_T1);
}

void read_all(const char* data, int64_t bytes) {
  // Each line is loaded in four pieces, to take more instructions. With a single load per line, the reorder buffer
  // would reach past the prefetched lines, and its demand loads would take the place of prefetches.
  constexpr int64_t kPiece = 16;
  __m128 sums[4] = {_mm_setzero_ps(), _mm_setzero_ps(), _mm_setzero_ps(), _mm_setzero_ps()};
  for (int64_t i = 0; i + 64 <= bytes; i += 64) {
    prefetch_after(data + i);
    for (int64_t piece = 0; piece < 4; ++piece) {
      sums[piece] = _mm_max_ps(sums[piece], _mm_load_ps(reinterpret_cast<const float*>(data + i + piece * kPiece)));
    }
  }
  volatile float used = _mm_cvtss_f32(_mm_max_ps(_mm_max_ps(sums[0], sums[1]), _mm_max_ps(sums[2], sums[3])));
  (void)used;
}

void update_all(char* data, int64_t bytes) {
  const Vec one = set(1);
  for (int64_t i = 0; i + 64 <= bytes; i += 64) {
    prefetch_after(data + i);
    float* const line = reinterpret_cast<float*>(data + i);
    for (int64_t lane = 0; lane < 16; lane += kLanes) store(line + lane, load(line + lane) + one);
  }
}

}  // namespace tilerank::TR_RUNG
#endif
