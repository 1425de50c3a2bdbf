#include "core/cpu.h"

#include <cpuid.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "core/selftest.h"

namespace tilerank {
namespace {

struct Registers {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
  return r;
}

uint64_t xcr0() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

struct Feature {
  const char* name;
  bool present;
};

template <size_t N>
std::string missing(const Feature (&features)[N]) {
  std::string names;
  for (const Feature& feature : features) {
    if (!feature.present) names += (names.empty() ? "" : ", ") + std::string(feature.name);
  }
  return names.empty() ? "" : "the CPU has no " + names;
}

bool bit(uint32_t word, int i) { return word >> i & 1; }

std::string avx2_obstacle() {
  const Registers one = cpuid(1, 0), seven = cpuid(7, 0);
  const std::string cpu = missing({{"avx", bit(one.c, 28)},
                                   {"avx2", bit(seven.b, 5)},
                                   {"fma", bit(one.c, 12)},
                                   {"f16c", bit(one.c, 29)},
                                   {"bmi1", bit(seven.b, 3)},
                                   {"bmi2", bit(seven.b, 8)}});
  if (!cpu.empty()) return cpu;
  if (!bit(one.c, 27) || (xcr0() & 0x6) != 0x6) return "the operating system does not save AVX registers (XCR0)";
  return "";
}

std::string avx512_obstacle() {
  const Registers seven = cpuid(7, 0);
  const std::string cpu = missing({{"avx512f", bit(seven.b, 16)},
                                   {"avx512dq", bit(seven.b, 17)},
                                   {"avx512bw", bit(seven.b, 30)},
                                   {"avx512vl", bit(seven.b, 31)},
                                   {"avx512_vnni", bit(seven.c, 11)}});
  if (!cpu.empty()) return cpu;
  if ((xcr0() & 0xe6) != 0xe6) return "the operating system does not save AVX-512 registers (XCR0)";
  return "";
}

std::string avx512_bf16_obstacle() {
  return missing({{"avx512_vbmi", bit(cpuid(7, 0).c, 1)}, {"avx512_bf16", bit(cpuid(7, 1).a, 5)}});
}

std::string amx_obstacle() {
  if (kEmulatesAmx) return "";
  const Registers seven = cpuid(7, 0);
  const std::string cpu =
      missing({{"amx_tile", bit(seven.d, 24)}, {"amx_bf16", bit(seven.d, 22)}, {"amx_int8", bit(seven.d, 25)}});
  if (!cpu.empty()) return cpu;
  if ((xcr0() & 0x60000) != 0x60000) return "the operating system does not save tile registers (XCR0)";
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) {
    return std::string("the operating system refused this process tile data (arch_prctl: ") + std::strerror(errno) +
           ")";
  }
  return "";
}

// The number of the newest rungs that a build for tests leaves out (setup.py). On such a rung, kernels of an older one
// would run with its scratch memory.
#ifdef TR_LEFT_OUT
constexpr int kLeftOut = TR_LEFT_OUT;
#else
constexpr int kLeftOut = 0;
#endif

// A hypervisor may announce instructions that it does not run, so the self-test is guarded against illegal
// instructions. The handler is installed only during the test, and faults of other threads get the default action.
thread_local sigjmp_buf* recovery = nullptr;

void on_illegal_instruction(int signal) {
  if (recovery) siglongjmp(*recovery, 1);
  ::signal(signal, SIG_DFL);
}

std::string self_test_obstacle(Isa isa) {
  struct sigaction guard = {}, before = {};
  guard.sa_handler = on_illegal_instruction;
  sigaction(SIGILL, &guard, &before);
  sigjmp_buf buffer;
  recovery = &buffer;
  volatile int outcome = 2;
  if (sigsetjmp(buffer, 1) == 0) outcome = self_test(isa) ? 0 : 1;
  recovery = nullptr;
  sigaction(SIGILL, &before, nullptr);
  if (outcome == 2) return "the CPU announces it but its instructions are illegal";
  return outcome == 1 ? "the self-test computed a wrong result" : "";
}

std::string find_obstacle(Isa isa) {
  std::string found;
  if (isa == Isa::avx2) found = avx2_obstacle();
  if (isa == Isa::avx512) found = avx512_obstacle();
  if (isa == Isa::avx512_bf16) found = avx512_bf16_obstacle();
  if (isa == Isa::amx) found = amx_obstacle();
  if (!found.empty() || isa == Isa::reference) return found;
  if (static_cast<int>(isa) >= kIsas - kLeftOut) return "this build of the core, which is for tests, leaves it out";
  return self_test_obstacle(isa);
}

}  // namespace

const char* isa_name(Isa isa) {
  constexpr const char* names[kIsas] = {"reference", "avx2", "avx512", "avx512_bf16", "amx"};
  return names[static_cast<int>(isa)];
}

const int64_t far_ahead = [] {
  const Registers vendor = cpuid(0, 0);
  const bool intel = vendor.b == 0x756e6547 && vendor.d == 0x49656e69 && vendor.c == 0x6c65746e;  // "GenuineIntel"
  return intel ? 12 << 10 : 0;
}();

bool follows_streams() {
  static const bool follows = [] {
    const Registers vendor = cpuid(0, 0);
    const bool amd = vendor.b == 0x68747541 && vendor.d == 0x69746e65 && vendor.c == 0x444d4163;  // "AuthenticAMD"
    const uint32_t version = cpuid(1, 0).a, family = (version >> 8 & 0xf) + (version >> 20 & 0xff);
    return amd && family <= 25;  // Zen 4
  }();
  return follows;
}

const std::string& isa_obstacle(Isa isa) {
  static const std::array<std::string, kIsas> obstacles = [] {
    std::array<std::string, kIsas> found;
    for (int i = 1; i < kIsas; ++i) {
      // Each rung also uses what the rungs below it need.
      found[i] = i > 1 && !found[i - 1].empty() ? found[i - 1] : find_obstacle(static_cast<Isa>(i));
    }
    return found;
  }();
  return obstacles[static_cast<int>(isa)];
}

}  // namespace tilerank
