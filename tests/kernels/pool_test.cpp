// The pool under the thread sanitizer: runs one case by name; exit status 0 if it holds. See test_threads.py.
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "core/pool.h"

using namespace tilerank;

#define EXPECT(condition)                                                 \
  if (!(condition)) {                                                     \
    std::fprintf(stderr, "line %d: expected %s\n", __LINE__, #condition); \
    std::exit(1);                                                         \
  }

namespace {

constexpr int kItems = 1000;

Args args_of(int64_t* data, int64_t parameter = 0) {
  Args args;
  args.tensors[0] = {data, DType::i64, 1, {kItems}, {1}};
  args.ints[0] = parameter;
  return args;
}

// Each thread fills its share and, after the barrier, reads its neighbour's.
void fill_then_read(const Args& args, Team& team) {
  int64_t* const data = args.tensors[0].as<int64_t>();
  const auto [begin, end] = team.share(kItems, 7);
  for (int64_t i = begin; i < end; ++i) data[i] = i + args.ints[0];
  team.barrier();
  for (int64_t i = 0; i < kItems; ++i) {
    if (data[i] != i + args.ints[0]) throw Error("a write before the barrier is not seen after it");
  }
  team.barrier();
}

void increment(const Args& args, Team& team) {
  // Reversed shares: a call reads what another thread wrote in the call before.
  const Team mirrored(nullptr, team.count - 1 - team.index, team.count);
  const auto [begin, end] = mirrored.share(kItems);
  for (int64_t i = begin; i < end; ++i) ++args.tensors[0].as<int64_t>()[i];
}

// The thread named by the argument fails while the others wait.
void fail_on_one(const Args& args, Team& team) {
  team.barrier();
  if (team.index == args.ints[0]) throw Error("thread " + std::to_string(team.index));
  team.barrier();
  team.barrier();
}

void expect_works(Pool& pool, int64_t offset) {
  std::vector<int64_t> data(kItems);
  const Call calls[] = {{fill_then_read, args_of(data.data(), offset)},
                        {increment, args_of(data.data())},
                        {fill_then_read, args_of(data.data(), offset + 5)},
                        {increment, args_of(data.data())}};
  pool.run(calls, 4);
  for (int i = 0; i < kItems; ++i) EXPECT(data[i] == i + offset + 6);
}

void test_barriers(int threads, bool spin) {
  Pool& pool = Pool::instance();
  pool.start({}, threads, spin);
  EXPECT(pool.threads() == threads);
  for (int64_t i = 0; i < 50; ++i) expect_works(pool, i);
}

void test_failures(int threads, bool spin) {
  Pool& pool = Pool::instance();
  pool.start({}, threads, spin);
  for (int i = 0; i < 50; ++i) {
    std::string caught;
    const int failing = i % threads;
    const Call call{fail_on_one, args_of(nullptr, failing)};
    try {
      pool.run(&call, 1);
    } catch (const Error& error) {
      caught = error.what();
    }
    EXPECT(caught == "thread " + std::to_string(failing));
    expect_works(pool, i);
  }
}

void test_callers_take_turns(int threads, bool spin) {
  Pool& pool = Pool::instance();
  pool.start({}, threads, spin);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&pool, caller] {
      for (int i = 0; i < 20; ++i) expect_works(pool, caller * 100 + i);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

void test_restart(int threads, bool spin) {
  Pool& pool = Pool::instance();
  for (int i = 0; i < 20; ++i) {
    pool.start({}, 1 + i % threads, spin);
    expect_works(pool, i);
  }
  pool.stop();
  EXPECT(pool.threads() == 1);
  expect_works(pool, 0);
}

void test_scratch(int threads, bool spin) {
  Pool& pool = Pool::instance();
  pool.start({}, threads, spin);
  const Kernel kernel = [](const Args& args, Team& team) {
    const size_t bytes = static_cast<size_t>(args.ints[0]);
    void* const own = team.scratch(bytes);
    std::memset(own, team.index, bytes);
    team.barrier();
    for (size_t i = 0; i < bytes; ++i) {
      if (static_cast<char*>(own)[i] != team.index) throw Error("scratch is shared");
    }
    if (reinterpret_cast<uintptr_t>(own) % 64 != 0 || team.scratch(bytes / 2) != own) throw Error("scratch moved");
  };
  for (const int64_t bytes : {100, 5000000, 64}) {
    const Call call{kernel, args_of(nullptr, bytes)};
    pool.run(&call, 1);
  }
}

void test_fork(int threads, bool spin) {
  Pool& pool = Pool::instance();
  pool.start({}, threads, spin);
  expect_works(pool, 1);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    EXPECT(pool.threads() == threads);
    expect_works(pool, 2);
    pool.stop();
    _exit(0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  EXPECT(status == 0);
  expect_works(pool, 3);
}

// A child that does not run anything before it forks itself.
void test_fork_twice(int threads, bool spin) {
  Pool& pool = Pool::instance();
  pool.start({}, threads, spin);
  expect_works(pool, 1);
  const pid_t child = fork();
  if (child == 0) {
    const pid_t grandchild = fork();
    alarm(20);
    if (grandchild == 0) {
      expect_works(pool, 2);
      _exit(0);
    }
    int status = 1;
    waitpid(grandchild, &status, 0);
    EXPECT(status == 0);
    expect_works(pool, 3);
    _exit(0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  EXPECT(status == 0);
  expect_works(pool, 4);
}

void test_pinning(int threads, bool spin) {
  cpu_set_t before;
  sched_getaffinity(0, sizeof(before), &before);
  std::vector<int> allowed, cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &before)) allowed.push_back(core);
  }
  for (int i = 0; i < threads; ++i) cores.push_back(allowed[(i + 1) % allowed.size()]);
  Pool& pool = Pool::instance();
  pool.start(cores, threads, spin);
  std::vector<int64_t> seen(kItems);
  const Kernel kernel = [](const Args& args, Team& team) {
    cpu_set_t set;
    sched_getaffinity(0, sizeof(set), &set);
    if (CPU_COUNT(&set) == 1) args.tensors[0].as<int64_t>()[team.index] = sched_getcpu();
  };
  const Call call{kernel, args_of(seen.data())};
  pool.run(&call, 1);
  for (int i = 0; i < threads; ++i) EXPECT(seen[i] == cores[i]);

  for (const int wrong : {CPU_SETSIZE - 1, -1, CPU_SETSIZE + 5}) {
    cores.back() = wrong;
    bool refused = false;
    try {
      pool.start(cores, threads, spin);
    } catch (const Error&) {
      refused = true;
    }
    EXPECT(refused && pool.threads() == 1);
    expect_works(pool, 4);
  }
  pool.stop();
  cpu_set_t after;
  sched_getaffinity(0, sizeof(after), &after);
  EXPECT(CPU_EQUAL(&before, &after));
}

}  // namespace

int main(int, char** argv) {
  const std::string name = argv[1];
  const int threads = std::atoi(argv[2]);
  const bool spin = std::string(argv[3]) == "spin";
  alarm(120);  // a lost wake-up would otherwise hang
  if (name == "barriers")
    test_barriers(threads, spin);
  else if (name == "failures")
    test_failures(threads, spin);
  else if (name == "callers")
    test_callers_take_turns(threads, spin);
  else if (name == "restart")
    test_restart(threads, spin);
  else if (name == "scratch")
    test_scratch(threads, spin);
  else if (name == "fork")
    test_fork(threads, spin);
  else if (name == "fork twice")
    test_fork_twice(threads, spin);
  else if (name == "pinning")
    test_pinning(threads, spin);
  else
    return 2;
  return 0;
}
