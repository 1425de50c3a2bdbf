#include "core/contract.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace tilerank {

Contract::Contract(std::string name, const py::list& operands) : name_(std::move(name)) {
  for (const py::handle each : operands) {
    const auto fields = each.cast<py::tuple>();
    Operand operand{fields[0].cast<char>(), fields[1].cast<Py_ssize_t>(), {},
                    fields[3].cast<bool>(), fields[4].cast<uint32_t>(),   fields[5].cast<int>(),
                    fields[6].cast<int>(),  fields[7].cast<int>(),        {}};
    for (const py::handle attribute : fields[2]) operand.attributes.push_back(attribute.inc_ref().ptr());
    for (const py::handle size : fields[8]) {
      Size steps;
      for (const py::handle step : size) {
        const auto [op, value] = step.cast<std::pair<char, int64_t>>();
        if (op == '$' && value >= kMaxSymbols) throw Error(name_ + ": expected fewer names of sizes");
        steps.push_back({op, value});
      }
      operand.sizes.push_back(std::move(steps));
    }
    num_arguments_ = std::max(num_arguments_, operand.argument + 1);
    num_outputs_ += operand.kind == 'o' || operand.kind == 'a';
    operands_.push_back(std::move(operand));
  }
  if (operands_.size() > kMaxOperands) throw Error(name_ + ": expected fewer operands");
}

bool Contract::fits(const py::tuple& arguments) const {
  Known known;
  Args args;
  std::vector<py::object> tensors;
  return match(arguments, known, args, tensors);
}

bool Contract::bind(const py::tuple& arguments, const std::shared_ptr<Arena>& arena, Args& args,
                    std::vector<py::object>& tensors) const {
  if (static_cast<Py_ssize_t>(arguments.size()) != num_arguments_) {
    throw Error(name_ + ": expected " + std::to_string(num_arguments_) + " arguments, found " +
                std::to_string(arguments.size()));
  }
  Known known;
  if (!match(arguments, known, args, tensors)) return false;
  for (const Operand& operand : operands_) {
    if (operand.kind != 'o' && operand.kind != 'a') continue;
    std::vector<int64_t> shape(known.leading, known.leading + (operand.leading == 1 ? known.num_leading : 0));
    for (const Size& size : operand.sizes) shape.push_back(known.value(size));
    const int dtype = std::countr_zero(accepted(operand, known));
    const bool absent = operand.optional && std::find(shape.begin(), shape.end(), 0) != shape.end();
    tensors.push_back(absent ? py::none() : empty(arena, shape, dtype, operand.kind == 'a'));
    args.tensors[args.num_tensors++] = read_tensor(tensors.back().ptr(), name_.c_str());
  }
  return true;
}

py::tuple Contract::outputs(const std::vector<py::object>& tensors) const {
  py::tuple all(num_outputs_);
  for (size_t i = 0; i < num_outputs_; ++i) all[i] = tensors[tensors.size() - num_outputs_ + i];
  return all;
}

bool Contract::match(const py::tuple& arguments, Known& known, Args& args, std::vector<py::object>& tensors) const {
  const auto given = [&](const Operand& operand) {
    return operand.argument >= 0 && operand.argument < static_cast<Py_ssize_t>(arguments.size());
  };
  const auto value = [&](const Operand& operand) {
    auto found = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(arguments.ptr(), operand.argument));
    for (PyObject* const name : operand.attributes) found = found.attr(py::handle(name));
    return found;
  };
  // Numbers and dtypes first: the sizes and dtypes of tensors may be those of arguments behind them.
  for (size_t i = 0; i < operands_.size(); ++i) {
    const Operand& operand = operands_[i];
    if (operand.kind == 't' || !given(operand)) continue;
    if (!match_number(i, value(operand).ptr(), known, args)) return false;
  }
  for (size_t i = 0; i < operands_.size(); ++i) {
    const Operand& operand = operands_[i];
    if (operand.kind != 't' || !given(operand)) continue;
    tensors.push_back(value(operand));
    Tensor& tensor = args.tensors[args.num_tensors++];
    if (!tensors.back().is_none()) {
      if (!(known.dtypes[i] = find_tensor(tensors.back().ptr(), name_.c_str(), tensor))) return false;
      if (!match_tensor(i, tensor, known)) return false;
    } else if (operand.optional) {
      tensor = Tensor{};
    } else {
      return false;
    }
  }
  // Sizes that are computed from others, now that all are known.
  int next = 0;
  for (const Operand& operand : operands_) {
    if (operand.kind != 't' || !given(operand)) continue;
    const int number = next++;
    if (!tensors[number].is_none() && !match_sizes(operand, args.tensors[number], known)) return false;
  }
  return true;
}

bool Contract::match_number(size_t i, PyObject* value, Known& known, Args& args) const {
  const Operand& operand = operands_[i];
  if (operand.kind == 'd') {
    const uint32_t found = known.dtypes[i] = find_dtypes(value), dtypes = accepted(operand, known);
    return found && (!dtypes || !(found & ~dtypes));
  }
  if (operand.kind == 'f') {
    args.floats[args.num_floats++] = PyFloat_AsDouble(value);
  } else {
    const int64_t number = PyLong_AsLongLong(value);
    if (operand.kind == 'i') args.ints[args.num_ints++] = number;
    if (operand.symbol >= 0) {
      known.symbols[operand.symbol] = number;
      known.has[operand.symbol] = true;
    }
  }
  if (PyErr_Occurred()) throw py::error_already_set();
  return true;
}

uint32_t Contract::accepted(const Operand& operand, const Known& known) const {
  return operand.dtypes || operand.same < 0 ? operand.dtypes : known.dtypes[operand.same];
}

bool Contract::match_tensor(size_t i, const Tensor& tensor, Known& known) const {
  const Operand& operand = operands_[i];
  const uint32_t dtypes = accepted(operand, known);
  if (dtypes && !(dtypes & known.dtypes[i])) return false;
  if (operand.leading < 0) return true;
  const int count = static_cast<int>(operand.sizes.size()), leading = tensor.ndim - count;
  if (operand.leading ? leading < 0 : leading != 0) return false;
  if (operand.leading) {
    if (known.num_leading < 0) std::copy_n(tensor.size, known.num_leading = leading, known.leading);
    if (leading != known.num_leading || !std::equal(tensor.size, tensor.size + leading, known.leading)) return false;
  }
  for (int dim = 0; dim < count; ++dim) {
    const Size& size = operand.sizes[dim];
    if (size.size() != 1 || size[0].op != '$' || known.has[size[0].value]) continue;
    known.symbols[size[0].value] = tensor.size[leading + dim];
    known.has[size[0].value] = true;
  }
  const int last = tensor.ndim - 1;
  const bool empty = std::find(tensor.size, tensor.size + tensor.ndim, 0) != tensor.size + tensor.ndim;
  return last < 0 || empty || tensor.size[last] <= 1 || tensor.stride[last] == 1;
}

bool Contract::match_sizes(const Operand& operand, const Tensor& tensor, const Known& known) const {
  const int leading = tensor.ndim - static_cast<int>(operand.sizes.size());
  for (size_t dim = 0; dim < operand.sizes.size(); ++dim) {
    const Size& size = operand.sizes[dim];
    const bool has = std::all_of(size.begin(), size.end(), [&](Step s) { return s.op != '$' || known.has[s.value]; });
    if (has && !size.empty() && known.value(size) != tensor.size[leading + static_cast<int>(dim)]) return false;
  }
  return true;
}

int64_t Contract::Known::value(const Size& size) const {
  int64_t stack[8], *top = stack;
  for (const Step& step : size) {
    if (step.op == '#' || step.op == '$') {
      *top++ = step.op == '#' ? step.value : symbols[step.value];
      continue;
    }
    --top;
    if (step.op == '+') top[-1] += top[0];
    if (step.op == '-') top[-1] -= top[0];
    if (step.op == '*') top[-1] *= top[0];
    if (step.op == '/') top[-1] /= std::max<int64_t>(top[0], 1);
  }
  return stack[0];
}

}  // namespace tilerank
