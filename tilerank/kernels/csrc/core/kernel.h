// The interface of kernels.
//
// To add the kernel `foo`:
//   1. csrc/<folder>/foo.cpp, in this shape (setup.py finds it; foreach_isa.h compiles the lower half once per rung, in
//      a target region of that rung, with simd-inl.h included; all other includes belong to the upper half, before any
//      region opens):
//
//        #ifndef TR_RUNG
//        #include "core/entry.h"
//        #define TR_SOURCE "<folder>/foo.cpp"
//        #include "simd/foreach_isa.h"
//        #else
//        namespace tilerank::TR_RUNG {
//        TR_ENTRY(foo, Team& team, const Tensor& x, float eps, const Tensor& out) {
//          const int64_t d = x.size[1];
//          auto [first, last] = team.share(x.size[0]);
//          ...
//        }
//        }
//        #endif
//
//      An AMX version is foo_amx.cpp of the same shape with `#define TR_ONLY_AMX` before foreach_isa.h. Without one,
//      the amx rung runs the avx512_bf16 kernel.
//   2. A function in kernels/*.py and beside it the contract of the kernel, one line that says its operands, sizes and
//      dtypes (kernels/contract.py): Contract("foo: x[m, d]:f32|bf16 eps:float -> out[m, d]:x", reference.foo).
//   3. A function of the same name in kernels/reference/, in plain torch: the definition of correctness.
//   4. A test in tests/kernels/, parametrised over the rungs.
//
// A kernel reads and writes only its arguments and team.scratch, allocates nothing that outlives the call, and splits
// work only by team.share, so that a row's result never depends on the other rows. It may throw Error (std::exception):
// the caller gets the first one, and threads that wait in a barrier are released. All threads of the team run the
// kernel at once. It needs no barrier at its end, because the pool has one after every kernel.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace tilerank {

// Becomes tilerank.kernels.errors.KernelError. One sentence: what was expected and what was found.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Isa : int { reference = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3, amx = 4 };
constexpr int kIsas = 5;

enum class DType : uint8_t { f32, bf16, f16, f64, i64, i32, i16, i8, u8, boolean, f8_e4m3, f8_e5m2 };
constexpr int64_t bytes_of(DType dtype) {
  constexpr int64_t kBytes[] = {4, 2, 2, 8, 8, 4, 2, 1, 1, 1, 1, 1};
  return kBytes[static_cast<int>(dtype)];
}

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
  void* data;  // null if the optional argument is None
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
  // Returns the tensor from element i of its first dimension on; an absent one stays absent.
  Tensor from(int64_t i) const {
    Tensor rest = *this;
    if (data) rest.data = as<char>() + i * stride[0] * bytes_of(dtype);
    rest.size[0] -= i;
    return rest;
  }
  explicit operator bool() const { return data != nullptr; }
};

// Arguments as plain data, which a recorded graph copies: tensors, then integers, then reals, in the order of the
// Python call.
struct Args {
  Tensor tensors[kMaxTensors];
  int64_t ints[kMaxNumbers];
  double floats[kMaxNumbers];
  int num_tensors = 0, num_ints = 0, num_floats = 0;
};

struct Range {
  int64_t begin, end;
};

class Pool;

// A thread's view of the threads that run a kernel together.
class Team {
 public:
  Team(Pool* pool, int index, int count) : Team(pool, index, count, index) {}
  // A team of this thread alone, for a kernel that runs another one on a part of its work.
  Team alone() const { return Team(pool_, 0, 1, worker_); }
  // Returns this thread's contiguous part of n items, in whole units (the last unit may be partial).
  Range share(int64_t n, int64_t unit = 1) const {
    const int64_t units = (n + unit - 1) / unit;
    const int64_t begin = units * index / count * unit, end = units * (index + 1) / count * unit;
    return {begin < n ? begin : n, end < n ? end : n};
  }
  // Waits until every thread of the team has arrived. Everything written before is visible afterwards.
  void barrier();
  // Returns this thread's own working memory (huge pages, 64-byte aligned), with undefined content, valid until the
  // kernel ends. It is kept for the next kernel, so that steps of a steady state allocate nothing.
  void* scratch(size_t bytes);
  // Returns the scratch memory of thread `index` of the team, to read after a barrier.
  const void* scratch_of(int index) const;

  const int index;
  const int count;

 private:
  Team(Pool* pool, int index, int count, int worker) : index(index), count(count), pool_(pool), worker_(worker) {}

  Pool* pool_;
  int worker_;  // this thread's number in the pool
};

using Kernel = void (*)(const Args&, Team&);

// Kernels by name and rung. Filled by static initialisers (entry.h), read-only afterwards.
void register_kernel(const char* name, Isa isa, Kernel kernel);

// Calls f(float{}) or f(bf16{}), according to the dtype of an activation or a packed weight.
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
