// The contract of a kernel, which kernels/contract.py parses from one line: compares arguments with its operands,
// allocates its outputs, and puts both into Args.
#pragma once
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "core/tensors.h"

namespace tilerank {

class Contract {
 public:
  // operands: tuples (kind, argument, attributes, optional, dtypes, same, symbol, leading, sizes), see Operand.
  Contract(std::string name, const py::list& operands);

  // Returns whether the arguments, which may be the first ones only, are as the line says.
  bool fits(const py::tuple& arguments) const;

  // Returns false if the arguments do not fit. Otherwise allocates the outputs and sets `args` and their `tensors`.
  bool bind(const py::tuple& arguments, const std::shared_ptr<Arena>& arena, Args& args,
            std::vector<py::object>& tensors) const;

  py::tuple outputs(const std::vector<py::object>& tensors) const;

 private:
  // A size in postfix notation: numbers (#), symbols ($) and operators (+ - * /) on the two values before them.
  struct Step {
    char op;
    int64_t value;
  };
  using Size = std::vector<Step>;  // empty: any

  struct Operand {
    char kind;                          // t: tensor, o: output, a: output with rows apart, i: integer, f: real;
                                        // s: size, d: dtype or dtypes, which the kernel does not get
    Py_ssize_t argument;                // its number among the arguments
    std::vector<PyObject*> attributes;  // names that lead from that argument to it
    bool optional;                      // may be None; an output is None if it would be empty
    uint32_t dtypes;  // bits in the order of kDTypes; 0: those of operand `same`, or any if that is -1
    int same;
    int symbol;   // of an integer or size
    int leading;  // 1: any number of dimensions comes before the sizes; -1: the sizes are not checked
    std::vector<Size> sizes;
  };

  // What is known of sizes and dtypes after some of the operands.
  static constexpr int kMaxSymbols = 24, kMaxOperands = 32;
  struct Known {
    int64_t symbols[kMaxSymbols];
    bool has[kMaxSymbols] = {};
    int64_t leading[kMaxDims];
    int num_leading = -1;                // not known yet
    uint32_t dtypes[kMaxOperands] = {};  // of every operand, as in Operand
    int64_t value(const Size& size) const;
  };

  bool match(const py::tuple& arguments, Known& known, Args& args, std::vector<py::object>& tensors) const;
  bool match_number(size_t i, PyObject* value, Known& known, Args& args) const;
  bool match_tensor(size_t i, const Tensor& tensor, Known& known) const;
  bool match_sizes(const Operand& operand, const Tensor& tensor, const Known& known) const;
  uint32_t accepted(const Operand& operand, const Known& known) const;

  std::string name_;
  std::vector<Operand> operands_;
  Py_ssize_t num_arguments_ = 0;
  size_t num_outputs_ = 0;
};

}  // namespace tilerank
