// The only file that knows Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/cpu.h"
#include "core/dlpack.h"
#include "core/graph.h"
#include "core/peaks.h"
#include "core/pool.h"
#include "core/registry.h"

namespace py = pybind11;

namespace tilerank {
namespace {

const dlpack::Exchange* exchange = nullptr;
PyTypeObject* tensor_type = nullptr;
PyObject* error_type = nullptr;
std::vector<PyObject*> dtype_objects;  // torch's, in the order of kDTypes
Isa current = Isa::reference;

// A graph, and the tensors that it reads or writes outside its own arena.
struct Recording {
  Graph graph;
  std::vector<py::object> kept;
};
thread_local Recording* recording = nullptr;  // where launches of this thread go instead of running

struct DTypeName {
  DType dtype;
  uint8_t code, bits;  // of DLPack
  const char* name;    // of torch
};
constexpr DTypeName kDTypes[] = {
    {DType::f32, 2, 32, "float32"},
    {DType::bf16, 4, 16, "bfloat16"},
    {DType::f16, 2, 16, "float16"},
    {DType::f64, 2, 64, "float64"},
    {DType::i64, 0, 64, "int64"},
    {DType::i32, 0, 32, "int32"},
    {DType::i16, 0, 16, "int16"},
    {DType::i8, 0, 8, "int8"},
    {DType::u8, 1, 8, "uint8"},
    {DType::boolean, 6, 8, "bool"},
    {DType::f8_e4m3, 10, 8, "float8_e4m3fn"},
    {DType::f8_e5m2, 12, 8, "float8_e5m2"},
};

const dlpack::Exchange* compatible(dlpack::Header* header) {
  while (header && (header->version.major != dlpack::kMajor || header->version.minor < dlpack::kMinor)) {
    header = header->version.major > dlpack::kMajor ? header->previous : nullptr;
  }
  return reinterpret_cast<const dlpack::Exchange*>(header);
}

// Tells this module the tensor type, whose instances it accepts and returns, the dtypes named by dtypes(), and the
// exception type it raises.
void attach(py::type tensor, const py::list& dtypes, py::type error) {
  const py::object capsule = tensor.attr("__dlpack_c_exchange_api__");
  auto* header = static_cast<dlpack::Header*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (!header) throw py::error_already_set();
  exchange = compatible(header);
  if (!exchange) {
    const auto [major, minor] = header->version;
    throw Error("attach: expected a tensor type with DLPack exchange version 1.3 or later 1.x, found " +
                std::to_string(major) + "." + std::to_string(minor));
  }
  tensor_type = reinterpret_cast<PyTypeObject*>(tensor.release().ptr());
  error_type = error.release().ptr();
  for (const py::handle dtype : dtypes) dtype_objects.push_back(dtype.inc_ref().ptr());
}

dlpack::Tensor borrow(PyObject* object, const char* where) {
  if (!exchange || !PyObject_TypeCheck(object, tensor_type)) {
    throw Error(std::string(where) + ": expected a tensor, found " + Py_TYPE(object)->tp_name);
  }
  dlpack::Tensor raw;
  if (exchange->borrow(object, &raw) != 0) throw py::error_already_set();
  if (raw.device.type != dlpack::kCpu) throw Error(std::string(where) + ": expected a CPU tensor");
  return raw;
}

// Null: a dtype that no kernel knows.
const DTypeName* find_dtype(const dlpack::DataType& dtype) {
  const DTypeName* known = nullptr;
  for (const DTypeName& type : kDTypes) {
    if (type.code == dtype.code && type.bits == dtype.bits && dtype.lanes == 1) known = &type;
  }
  return known;
}

// Is it surely a CPU tensor of this dtype (or one of a tuple) and shape (None: any size), its last dimension
// contiguous? kernels/check.py knows why not, at ten times the price.
bool fits(const py::object& object, const py::tuple& shape, const py::object& dtype) {
  if (!PyObject_TypeCheck(object.ptr(), tensor_type)) return false;
  dlpack::Tensor raw;
  if (exchange->borrow(object.ptr(), &raw) != 0) {
    PyErr_Clear();
    return false;
  }
  const DTypeName* const known = find_dtype(raw.dtype);
  if (!known || raw.device.type != dlpack::kCpu || raw.ndim != static_cast<int32_t>(shape.size())) return false;
  PyObject* const found = dtype_objects[static_cast<size_t>(known - kDTypes)];
  bool wanted = dtype.ptr() == found;
  if (PyTuple_Check(dtype.ptr())) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dtype.ptr()); ++i) wanted |= PyTuple_GET_ITEM(dtype.ptr(), i) == found;
  }
  for (int i = 0; i < raw.ndim && wanted; ++i) {
    PyObject* const size = PyTuple_GET_ITEM(shape.ptr(), i);
    if (size != Py_None) wanted = PyLong_Check(size) && PyLong_AsLongLong(size) == raw.shape[i];
  }
  if (PyErr_Occurred()) PyErr_Clear();
  return wanted && (raw.ndim == 0 || raw.shape[raw.ndim - 1] <= 1 || raw.strides[raw.ndim - 1] == 1);
}

Tensor read_tensor(PyObject* object, const char* where) {
  Tensor tensor{};
  if (object == Py_None) return tensor;
  const dlpack::Tensor raw = borrow(object, where);
  const DTypeName* const known = find_dtype(raw.dtype);
  if (!known) throw Error(std::string(where) + ": a tensor has a dtype that no kernel knows");
  if (raw.ndim > kMaxDims) {
    throw Error(std::string(where) + ": expected at most " + std::to_string(kMaxDims) + " dimensions, found " +
                std::to_string(raw.ndim));
  }
  tensor.data = static_cast<char*>(raw.data) + raw.byte_offset;
  tensor.dtype = known->dtype;
  tensor.ndim = raw.ndim;
  for (int i = 0; i < raw.ndim; ++i) {
    tensor.size[i] = raw.shape[i];
    tensor.stride[i] = raw.strides[i];
  }
  return tensor;
}

void expect_at_most(int limit, Py_ssize_t found, const char* what) {
  if (found > limit) {
    throw Error("launch: expected at most " + std::to_string(limit) + " " + what + ", found " + std::to_string(found));
  }
}

void record(int id, const Call& call, const py::tuple& tensors) {
  recording->graph.add(id, call);
  for (int i = 0; i < call.args.num_tensors; ++i) {
    const void* const data = call.args.tensors[i].data;
    if (data && !recording->graph.arena()->contains(data)) recording->kept.push_back(tensors[i]);
  }
}

void launch(int id, const py::tuple& tensors, const py::tuple& ints, const py::tuple& floats) {
  Call call;
  call.kernel = find_kernel(id, current);
  Args& args = call.args;
  args.num_tensors = static_cast<int>(tensors.size());
  args.num_ints = static_cast<int>(ints.size());
  args.num_floats = static_cast<int>(floats.size());
  expect_at_most(kMaxTensors, args.num_tensors, "tensors");
  expect_at_most(kMaxNumbers, args.num_ints, "integers");
  expect_at_most(kMaxNumbers, args.num_floats, "reals");
  for (int i = 0; i < args.num_tensors; ++i) {
    args.tensors[i] = read_tensor(PyTuple_GET_ITEM(tensors.ptr(), i), "launch");
  }
  for (int i = 0; i < args.num_ints; ++i) args.ints[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(ints.ptr(), i));
  for (int i = 0; i < args.num_floats; ++i) args.floats[i] = PyFloat_AsDouble(PyTuple_GET_ITEM(floats.ptr(), i));
  if (PyErr_Occurred()) throw py::error_already_set();
  if (recording) {
    record(id, call, tensors);
    return;
  }
  py::gil_scoped_release unlocked;
  Pool::instance().run(&call, 1);
}

// A tensor over memory of ours, given back when its last view dies, on whatever thread.
struct Owner {
  dlpack::Managed managed;
  int64_t shape[kMaxDims], strides[kMaxDims];
  size_t bytes;
  std::shared_ptr<Arena> arena;  // none for memory of its own
  void* block;                   // of the arena
};

py::object import_tensor(std::unique_ptr<Owner> owner, void* data, size_t ndim, dlpack::DataType type,
                         void (*release)(dlpack::Managed*)) {
  dlpack::Managed& managed = owner->managed;
  managed.version = {dlpack::kMajor, dlpack::kMinor};
  managed.context = owner.get();
  managed.deleter = release;
  managed.flags = 0;
  managed.tensor = {data, {dlpack::kCpu, 0}, static_cast<int32_t>(ndim), type, owner->shape, owner->strides, 0};
  void* object = nullptr;
  if (exchange->import_managed(&owner.release()->managed, &object) != 0) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
}

void give_back(dlpack::Managed* managed) {
  auto* owner = static_cast<Owner*>(managed->context);
  owner->arena->free(owner->block);
  delete owner;
}

// From one of m rows of so many elements to the next, if whole lines apart then an odd number of them. Few rows are
// read in another way (csrc/gemm_amx.h).
size_t row_distance(int64_t m, size_t elements, const DTypeName& type) {
  constexpr int64_t kFewRows = 16;
  const size_t line = size_t{64} * 8 / type.bits;
  return m > kFewRows && elements != 0 && elements % (2 * line) == 0 ? elements + line : elements;
}

// Sizes and strides: contiguous, but for the first stride where rows are to lie apart.
std::unique_ptr<Owner> make_owner(const std::vector<int64_t>& shape, const DTypeName& type, bool apart = false) {
  if (!exchange) throw Error("attach() must come first");
  if (shape.size() > kMaxDims) {
    throw Error("empty: expected at most " + std::to_string(kMaxDims) + " dimensions, found " +
                std::to_string(shape.size()));
  }
  auto owner = std::make_unique<Owner>();
  size_t elements = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] < 0) throw Error("empty: expected no negative size, found " + std::to_string(shape[i]));
    owner->shape[i] = shape[i];
    if (apart && i == 0) elements = row_distance(shape[0], elements, type);
    owner->strides[i] = static_cast<int64_t>(elements);
    if (__builtin_mul_overflow(elements, static_cast<size_t>(shape[i]), &elements) || elements > (size_t{1} << 56)) {
      throw Error("empty: expected a tensor that fits in memory");
    }
  }
  owner->bytes = elements * type.bits / 8;
  return owner;
}

py::object empty(const std::vector<int64_t>& shape, int dtype, bool apart) {
  const DTypeName& type = kDTypes[dtype];
  auto owner = make_owner(shape, type, apart);
  owner->arena = recording ? recording->graph.arena() : Arena::instance();
  void* const data = owner->block = owner->arena->allocate(owner->bytes);
  return import_tensor(std::move(owner), data, shape.size(), {type.code, type.bits, 1}, give_back);
}

// A view [shape] of a tensor of the arena, `first` elements on, these many elements from each to the next; None of
// another tensor. Torch's own views cost several times as much, and more while a step is recorded.
py::object view(const py::object& of, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
                int64_t first) {
  const dlpack::Tensor raw = borrow(of.ptr(), "view");
  char* const data = static_cast<char*>(raw.data) + raw.byte_offset + first * (raw.dtype.bits / 8);
  auto arena = recording ? recording->graph.arena() : Arena::instance();
  if (shape.size() != strides.size() || shape.size() > kMaxDims) throw Error("view: expected as many strides as sizes");
  void* const block = arena->hold(data);
  if (!block) return py::none();
  auto owner = std::make_unique<Owner>();
  std::copy(shape.begin(), shape.end(), owner->shape);
  std::copy(strides.begin(), strides.end(), owner->strides);
  owner->arena = std::move(arena);
  owner->block = block;
  return import_tensor(std::move(owner), data, shape.size(), raw.dtype, give_back);
}

// The same memory, without its block in the arena: that may be used again while this tensor lives.
py::object alias_of(const Recording& self, const py::object& result) {
  const dlpack::Tensor raw = borrow(result.ptr(), "Graph");
  char* const data = static_cast<char*>(raw.data) + raw.byte_offset;
  const bool hollow = std::count(raw.shape, raw.shape + raw.ndim, 0) > 0;  // such a tensor has no address
  if (raw.ndim > kMaxDims || !(hollow || self.graph.arena()->contains(data))) {
    throw Error("Graph: expected the recorded step to return what a kernel made, found another tensor");
  }
  auto owner = std::make_unique<Owner>();
  std::copy_n(raw.shape, raw.ndim, owner->shape);
  std::copy_n(raw.strides, raw.ndim, owner->strides);
  owner->arena = self.graph.arena();
  return import_tensor(std::move(owner), data, static_cast<size_t>(raw.ndim), raw.dtype,
                       [](dlpack::Managed* managed) { delete static_cast<Owner*>(managed->context); });
}

py::object alloc(int64_t bytes) {
  const DTypeName& type = kDTypes[static_cast<int>(DType::u8)];
  auto owner = make_owner({bytes}, type);
  void* const data = map_pages(owner->bytes);
  return import_tensor(std::move(owner), data, 1, {type.code, type.bits, 1}, [](dlpack::Managed* managed) {
    auto* owner = static_cast<Owner*>(managed->context);
    unmap_pages(managed->tensor.data, owner->bytes);
    delete owner;
  });
}

void drop_pages(const py::object& tensor) {
  const dlpack::Tensor raw = borrow(tensor.ptr(), "drop_pages");
  int64_t first = 0, last = 0;  // in elements, over all strides
  for (int i = 0; i < raw.ndim; ++i) {
    if (raw.shape[i] == 0) return;
    (raw.strides[i] < 0 ? first : last) += (raw.shape[i] - 1) * raw.strides[i];
  }
  const int64_t element = raw.dtype.bits / 8;
  char* const start = static_cast<char*>(raw.data) + raw.byte_offset + first * element;
  drop_file_pages(start, static_cast<size_t>((last - first + 1) * element));
}

}  // namespace
}  // namespace tilerank

PYBIND11_MODULE(_C, m) {
  using namespace tilerank;
  py::register_exception_translator([](std::exception_ptr failure) {
    try {
      if (failure) std::rethrow_exception(failure);
    } catch (const Error& error) {
      PyErr_SetString(error_type ? error_type : PyExc_ValueError, error.what());
    }
  });
  m.def("attach", &attach);
  m.def("obstacles", [] {
    std::vector<std::pair<std::string, std::string>> all;
    for (int i = kIsas - 1; i > 0; --i) all.emplace_back(isa_name(Isa{i}), isa_obstacle(Isa{i}));
    return all;
  });
  m.attr("emulates_amx") = kEmulatesAmx;
  m.def("set_isa", [](const std::string& name) {
    for (int i = 0; i < kIsas; ++i) {
      if (name == isa_name(Isa{i}) && isa_obstacle(Isa{i}).empty()) current = Isa{i};
    }
  });
  m.def("kernel", &kernel_id);
  m.def("kernels", [] {
    py::dict all;
    for (const auto& [name, rungs] : registered_kernels()) {
      py::list names;
      for (const Isa isa : rungs) names.append(isa_name(isa));
      all[py::str(name)] = names;
    }
    return all;
  });
  m.def("launch", &launch);
  m.def("start_pool", [](const std::vector<int>& cores, int threads, bool spin) {
    py::gil_scoped_release unlocked;
    Pool::instance().start(cores, threads, spin);
  });
  m.def("stop_pool", [] {
    py::gil_scoped_release unlocked;
    Pool::instance().stop();
  });
  m.def("num_threads", [] { return Pool::instance().threads(); });
  m.def("dtypes", [] {
    std::vector<std::string> names;
    for (const DTypeName& type : kDTypes) names.emplace_back(type.name);
    return names;
  });
  m.def("fits", &fits);
  m.def("empty", &empty);
  m.def("view", &view);
  m.def("alloc", &alloc);
  m.def("drop_pages", &drop_pages);
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  m.def("measure_read", [](const std::vector<int>& cores, const std::vector<py::object>& memory) {
    std::vector<char*> data;
    int64_t bytes = 0;
    for (const py::object& part : memory) {
      const dlpack::Tensor raw = borrow(part.ptr(), "measure_read");
      data.push_back(static_cast<char*>(raw.data));
      bytes = raw.shape[0];
    }
    py::gil_scoped_release unlocked;
    return measure_read(cores, data, bytes);
  });
  m.def("measure_first_touch", &measure_first_touch, no_gil);
  m.def("measure_amx", &measure_amx, no_gil);
  m.def(
      "measure_vectors",
      [](const std::vector<int>& cores, int dtype) {
        return measure_vectors(cores, current, static_cast<DType>(dtype));
      },
      no_gil);
  m.def("measure_core_to_core", &measure_core_to_core, no_gil);
  m.def("arena_bytes", [] { return std::pair(Arena::instance()->used(), Arena::instance()->mapped()); });
  py::class_<Graph::Profile>(m, "Profile")
      .def_property_readonly("entries",
                             [](const Graph::Profile& self) {
                               py::list entries;
                               for (const auto& [kernel, seconds] : self.entries) {
                                 entries.append(py::make_tuple(kernel, seconds));
                               }
                               return entries;
                             })
      .def_readonly("seconds", &Graph::Profile::seconds);
  py::class_<Recording>(m, "Graph")
      .def(py::init([](const Recording* share) {
             return Recording{Graph(share ? share->graph.arena() : std::make_shared<Arena>(true)), {}};
           }),
           py::arg("share"))
      .def("begin",
           [](Recording& self) {
             if (recording) throw Error("Graph: expected one recording at a time, found another under way");
             recording = &self;
           })
      .def("end", [](Recording&) { recording = nullptr; })
      .def("alias", &alias_of)
      .def(
          "run", [](const Recording& self, size_t begin, size_t end) { self.graph.run(begin, end); }, no_gil)
      .def(
          "profile", [](const Recording& self, size_t begin, size_t end) { return self.graph.profile(begin, end); },
          no_gil)
      .def("__len__", [](const Recording& self) { return self.graph.size(); })
      .def("memory", [](const Recording& self) { return self.graph.arena()->mapped(); });
}
