// What a kernel is.
//
// To add the kernel `foo`:
//   1. csrc/foo.cpp, in this shape (setup.py finds it; foreach_isa.h compiles the lower half once per rung, in a target
//      region of that rung, with simd.h included; all other includes go to the upper half, before any region opens):
//
//        #ifndef TR_RUNG
//        #include "core/kernel.h"
//        #define TR_SOURCE "foo.cpp"
//        #include "simd/foreach_isa.h"
//        #else
//        namespace tilerank::TR_RUNG {
//        static void foo(const Args& args, Team& team) {
//          const Tensor& x = args.tensor(0);
//          auto [first, last] = team.share(x.size[0]);
//          ...
//        }
//        TR_KERNEL(foo)
//        }
//        #endif
//
//      An AMX version is foo_amx.cpp of the same shape with `#define TR_ONLY_AMX` before foreach_isa.h; where there is
//      none, the amx rung runs the avx512_bf16 kernel.
//   2. a face in kernels/*.py: checks shapes and dtypes, allocates the result with core.empty, calls
//      core.launch(core.kernel("foo"), tensors, ints, floats), or the reference when core.isa() == "reference".
//   3. the same name in kernels/reference.py, in plain torch: the definition of correctness.
//   4. a parametrised test over core.isa_report() in tests/test_kernels_*.py.
//
// A kernel reads and writes only its arguments and team.scratch, allocates nothing that outlives the call, and splits
// work only by team.share, so that one row's result never depends on the other rows. It may throw Error
// (std::exception): the first one reaches the caller, and threads that wait in a barrier are released. All threads of
// the team run it at once; they leave it without a barrier, the pool has one after every kernel.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace tilerank {

// Becomes tilerank.kernels.errors.KernelError: one sentence, what was expected and what was found.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Isa : int { reference = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3, amx = 4 };
constexpr int kIsas = 5;

enum class DType : uint8_t { f32, bf16, f16, f64, i64, i32, i16, i8, u8, boolean, f8_e4m3, f8_e5m2 };

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

constexpr int kMaxDims = 5;
constexpr int kMaxTensors = 16;
constexpr int kMaxNumbers = 16;

struct Tensor {
  void* data;  // null: the optional argument is None
  DType dtype;
  int32_t ndim;
  int64_t size[kMaxDims];
  int64_t stride[kMaxDims];  // in elements

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  template <class T>
  T* row(int64_t i) const {
    return static_cast<T*>(data) + i * stride[0];
  }
  explicit operator bool() const { return data != nullptr; }
};

// Plain data, copied into a recorded graph: tensors, then integers, then reals, in the order of the Python call.
struct Args {
  Tensor tensors[kMaxTensors];
  int64_t ints[kMaxNumbers];
  double floats[kMaxNumbers];
  int num_tensors = 0, num_ints = 0, num_floats = 0;

  const Tensor& tensor(int i) const { return tensors[i]; }
  int64_t integer(int i) const { return ints[i]; }
  float real(int i) const { return static_cast<float>(floats[i]); }
};

struct Range {
  int64_t begin, end;
};

class Pool;

// One thread's view of the threads that run a kernel together.
class Team {
 public:
  Team(Pool* pool, int index, int count) : index(index), count(count), pool_(pool) {}
  // This thread's contiguous part of n items, dealt in whole units (the last unit may be partial).
  Range share(int64_t n, int64_t unit = 1) const {
    const int64_t units = (n + unit - 1) / unit;
    const int64_t begin = units * index / count * unit, end = units * (index + 1) / count * unit;
    return {begin < n ? begin : n, end < n ? end : n};
  }
  // Every thread of the team arrives, then all go on; what was written before is visible after.
  void barrier();
  // This thread's own working memory (huge pages, 64-byte aligned), content undefined, valid until the kernel ends. It
  // is kept for the next kernel, so that a step in its steady state allocates nothing.
  void* scratch(size_t bytes);
  // What thread `index` of the team got last, to read after a barrier.
  const void* scratch_of(int index) const;

  const int index;
  const int count;

 private:
  Pool* pool_;
};

using Kernel = void (*)(const Args&, Team&);

// Kernels by name and rung. Filled by static initialisers (TR_KERNEL), read-only afterwards.
void register_kernel(const char* name, Isa isa, Kernel kernel);
struct Registration {
  Registration(const char* name, Isa isa, Kernel kernel) { register_kernel(name, isa, kernel); }
};
#define TR_KERNEL(name) static const ::tilerank::Registration registration_##name(#name, TR_ISA, name);

// f(float{}) or f(bf16{}), as the dtype of an activation or a packed weight says.
template <class F>
void for_float(DType dtype, F&& f) {
  if (dtype == DType::f32) {
    f(float{});
  } else if (dtype == DType::bf16) {
    f(bf16{});
  } else {
    throw Error("launch: expected a float32 or bfloat16 tensor, found dtype code " +
                std::to_string(static_cast<int>(dtype)));
  }
}

}  // namespace tilerank
