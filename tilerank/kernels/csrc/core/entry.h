// Kernels as functions with named parameters.
//
//   TR_ENTRY(rms_norm, Team& team, const Tensor& x, const Tensor& weight, float eps, bool zero_centered,
//            const Tensor& out) {
//     ...
//   }
//
// The parameters are those of the contract in kernels/*.py (kernels/contract.py), in its order: `const Tensor&` for
// tensors and outputs, `int64_t`, `bool` or `float` for numbers, and a struct of tensors for the weight of a format,
// such as `const Int8Weight&`. A contract refuses a core with other parameters.
#pragma once
#include <algorithm>
#include <array>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core/kernel.h"

namespace tilerank {

// A struct of tensors. kFields has their names.
template <class T>
concept TensorRecord = requires { std::string_view(std::remove_cvref_t<T>::kFields); };

// What a kernel keeps of a parameter T during a call.
template <class T>
using Kept = std::conditional_t<TensorRecord<T>, std::remove_cvref_t<T>, T>;

// The names of the fields of a parameter T, or null if it is no struct of tensors.
template <class T>
constexpr const char* fields_of() {
  if constexpr (TensorRecord<T>) return std::remove_cvref_t<T>::kFields;
  return nullptr;
}

// Reads the parameters of a kernel one after the other. Tensors, integers and reals are counted separately.
struct ArgReader {
  const Args& args;
  int tensors = 0, ints = 0, floats = 0;

  template <class T>
  Kept<T> next() {
    if constexpr (TensorRecord<T>) {
      constexpr std::string_view kNames = std::remove_cvref_t<T>::kFields;
      constexpr auto kCount = std::count(kNames.begin(), kNames.end(), ' ') + 1;
      return [&]<size_t... i>(std::index_sequence<i...>) {
        return Kept<T>{(static_cast<void>(i), args.tensors[tensors++])...};  // braces: in this order
      }(std::make_index_sequence<kCount>());
    } else if constexpr (std::is_same_v<T, const Tensor&>) {
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
    const std::tuple<Kept<Ts>...> all{reader.next<Ts>()...};  // braces: in this order
    std::apply([&](const auto&... each) { function(team, each...); }, all);
  }
  static constexpr std::array<const char*, sizeof...(Ts)> kFields{fields_of<Ts>()...};
};

// Notes the text of a kernel's parameters, and their fields_of. Versions of a kernel for several rungs have equal ones.
void note_parameters(const char* name, const char* parameters, std::span<const char* const> fields);
struct EntryRegistration {
  EntryRegistration(const char* name, Isa isa, Kernel kernel, const char* parameters,
                    std::span<const char* const> fields) {
    register_kernel(name, isa, kernel);
    note_parameters(name, parameters, fields);
  }
};

#define TR_ENTRY(name, ...)                                                 \
  static void name##_entry(__VA_ARGS__);                                    \
  static const ::tilerank::EntryRegistration registration_##name(           \
      #name, TR_ISA, ::tilerank::Unpacked<name##_entry>::run, #__VA_ARGS__, \
      ::tilerank::Unpacked<name##_entry>::kFields);                         \
  static void name##_entry(__VA_ARGS__)

}  // namespace tilerank
