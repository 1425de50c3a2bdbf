// The Python module of the compiled core.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/arena.h"
#include "core/contract.h"
#include "core/cpu.h"
#include "core/graph.h"
#include "core/peaks.h"
#include "core/pool.h"
#include "core/registry.h"
#include "core/tensors.h"

namespace tilerank {
namespace {

PyObject* error_type = nullptr;

// A graph, and the tensors that it reads or writes outside its own arena.
struct Recording {
  Graph graph;
  std::vector<py::object> kept;
};
thread_local Recording* recording = nullptr;  // the recording that this thread's launches are added to; null: they run

// The arena for new tensors of this thread.
const std::shared_ptr<Arena>& arena() { return recording ? recording->graph.arena() : Arena::instance(); }

// Sets the tensor type, its dtypes (see attach_tensors), and the type of the exceptions that this module raises.
void attach(py::type tensor, const py::list& dtypes, py::type error) {
  attach_tensors(std::move(tensor), dtypes);
  error_type = error.release().ptr();
}

// Runs a call, or adds it to the recording in progress. tensors: those of the arguments, in their order.
void run(int id, Call& call, const std::vector<py::object>& tensors) {
  call.kernel = chosen_kernel(id);
  if (!recording) {
    py::gil_scoped_release unlocked;
    Pool::instance().run(&call, 1);
    return;
  }
  recording->graph.add(id, call);
  for (int i = 0; i < call.args.num_tensors; ++i) {
    const void* const data = call.args.tensors[i].data;
    if (data && !recording->graph.arena()->contains(data)) recording->kept.push_back(tensors[i]);
  }
}

// Returns the rung of that name. Throws Error if there is none that this machine can run.
Isa usable_isa(const std::string& name) {
  for (int i = 0; i < kIsas; ++i) {
    if (name == isa_name(Isa{i}) && isa_obstacle(Isa{i}).empty()) return Isa{i};
  }
  throw Error("isa: expected a rung that this machine can run, found " + name);
}

// Touches every `step` bytes of a tensor on all threads.
void touch(const py::object& data, int64_t step) {
  static const int id = kernel_id("touch");
  Call call;
  call.args.tensors[call.args.num_tensors++] = read_tensor(data.ptr(), "touch");
  call.args.ints[call.args.num_ints++] = step;
  run(id, call, {data});
}

// Runs a kernel by its contract and returns its outputs, or None if the arguments do not fit.
py::object run_contract(const Contract& contract, int id, const py::tuple& arguments) {
  Call call;
  std::vector<py::object> tensors;
  if (!contract.bind(arguments, arena(), call.args, tensors)) return py::none();
  run(id, call, tensors);
  return contract.outputs(tensors);
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
  m.def("choose_isa",
        [](const std::string& kernel, const std::string& isa) { choose_isa(kernel_id(kernel), usable_isa(isa)); });
  m.def("kernel", &kernel_id);
  m.def("parameters", &kernel_parameters);
  m.def("kernels", [] {
    py::dict all;
    for (const auto& [name, rungs] : registered_kernels()) {
      py::list names;
      for (const Isa isa : rungs) names.append(isa_name(isa));
      all[py::str(name)] = names;
    }
    return all;
  });
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
  m.def("empty",
        [](const std::vector<int64_t>& shape, int dtype, bool apart) { return empty(arena(), shape, dtype, apart); });
  m.def("view", [](const py::object& of, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
                   int64_t first) { return view(arena(), of, shape, strides, first); });
  // Lets a change of pages take a tensor of bytes.
  const auto on_pages = [](auto change) {
    return [change](const py::object& tensor) {
      const dlpack::Tensor raw = borrow(tensor.ptr(), "pages");
      py::gil_scoped_release unlocked;
      return change(raw.data, static_cast<size_t>(raw.shape[0]));
    };
  };
  m.def("alloc", &alloc);
  m.def("map_file", &map_bytes);
  m.def("join_pages", on_pages(join_pages));
  m.def("protect", on_pages(protect_pages));
  m.def("touch", &touch);
  m.def("drop_pages", &drop_pages);
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  // Lets a measurement of memory run on tensors of bytes, one for each core, all of one size.
  const auto on_memory = [](auto measure) {
    return [measure](const std::vector<int>& cores, const std::vector<py::object>& memory) {
      std::vector<char*> data;
      int64_t bytes = 0;
      for (const py::object& part : memory) {
        const dlpack::Tensor raw = borrow(part.ptr(), "peaks");
        data.push_back(static_cast<char*>(raw.data));
        bytes = raw.shape[0];
      }
      py::gil_scoped_release unlocked;
      return measure(cores, data, bytes);
    };
  };
  m.def("measure_read", on_memory(measure_read));
  m.def("measure_update", on_memory(measure_update));
  m.def("measure_first_touch", &measure_first_touch, no_gil);
  m.def("measure_amx", &measure_amx, no_gil);
  m.def(
      "measure_vectors",
      [](const std::vector<int>& cores, const std::string& isa, int dtype) {
        return measure_vectors(cores, usable_isa(isa), static_cast<DType>(dtype));
      },
      no_gil);
  m.def("measure_core_to_core", &measure_core_to_core, no_gil);
  m.def("arena_bytes", [] { return std::pair(Arena::instance()->used(), Arena::instance()->mapped()); });
  py::class_<Contract>(m, "Contract")
      .def(py::init<std::string, const py::list&>())
      .def("fits", &Contract::fits)
      .def("run", &run_contract);
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
             if (recording) throw Error("Graph: expected one recording at a time, found another in progress");
             recording = &self;
           })
      .def("end", [](Recording&) { recording = nullptr; })
      .def("alias", [](const Recording& self, const py::object& of) { return alias(self.graph.arena(), of); })
      .def(
          "run", [](const Recording& self, size_t begin, size_t end) { self.graph.run(begin, end); }, no_gil)
      .def(
          "profile", [](const Recording& self, size_t begin, size_t end) { return self.graph.profile(begin, end); },
          no_gil)
      .def("__len__", [](const Recording& self) { return self.graph.size(); })
      .def("memory", [](const Recording& self) { return self.graph.arena()->mapped(); });
}
