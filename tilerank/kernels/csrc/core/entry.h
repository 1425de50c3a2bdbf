// Kernels as functions with named parameters.
//
//   TR_ENTRY(rms_norm, Team& team, const Tensor& x, const Tensor& weight, float eps, bool zero_centered,
//            const Tensor& out) {
//     ...
//   }
//
// The parameters are those of the contract in kernels/*.py (kernels/contract.py), in its order: `const Tensor&` for
// tensors and outputs, `int64_t`, `bool` or `float` for numbers. A contract refuses a core with other parameters.
#pragma once
#include <tuple>
#include <type_traits>

#include "core/kernel.h"

namespace tilerank {

// Reads the parameters of a kernel one after the other. Tensors, integers and reals are counted separately.
struct ArgReader {
  const Args& args;
  int tensors = 0, ints = 0, floats = 0;

  template <class T>
  T next() {
    if constexpr (std::is_same_v<T, const Tensor&>) {
      return args.tensors[tensors++];
    } else if constexpr (std::is_same_v<T, float>) {
      return static_cast<float>(args.floats[floats++]);
    } else {
      return static_cast<T>(args.ints[ints++]);
    }
  }
};

template <auto function>
struct Unpacked;
template <class... Ts, void (*function)(Team&, Ts...)>
struct Unpacked<function> {
  static void run(const Args& args, Team& team) {
    ArgReader reader{args};
    const std::tuple<Ts...> all{reader.next<Ts>()...};  // braces: in this order
    std::apply([&](Ts... each) { function(team, each...); }, all);
  }
};

// Notes the text of a kernel's parameters. Versions of a kernel for several rungs have equal parameters.
void note_parameters(const char* name, const char* parameters);
struct EntryRegistration {
  EntryRegistration(const char* name, Isa isa, Kernel kernel, const char* parameters) {
    register_kernel(name, isa, kernel);
    note_parameters(name, parameters);
  }
};

#define TR_ENTRY(name, ...)                                                  \
  static void name##_entry(__VA_ARGS__);                                     \
  static const ::tilerank::EntryRegistration registration_##name(            \
      #name, TR_ISA, ::tilerank::Unpacked<name##_entry>::run, #__VA_ARGS__); \
  static void name##_entry(__VA_ARGS__)

}  // namespace tilerank
