#include "core/tensors.h"

#include <algorithm>
#include <string>

namespace tilerank {
namespace {

const dlpack::Exchange* exchange = nullptr;
PyTypeObject* tensor_type = nullptr;
std::vector<PyObject*> dtype_objects;  // torch's dtypes, in the order of kDTypes

const dlpack::Exchange* compatible(dlpack::Header* header) {
  while (header && (header->version.major != dlpack::kMajor || header->version.minor < dlpack::kMinor)) {
    header = header->version.major > dlpack::kMajor ? header->previous : nullptr;
  }
  return reinterpret_cast<const dlpack::Exchange*>(header);
}

// Returns null for a dtype that no kernel supports.
const DTypeName* find_dtype(const dlpack::DataType& dtype) {
  const DTypeName* known = nullptr;
  for (const DTypeName& type : kDTypes) {
    if (type.code == dtype.code && type.bits == dtype.bits && dtype.lanes == 1) known = &type;
  }
  return known;
}

// Owns the memory of a tensor until its last view dies, on whatever thread.
struct Owner {
  dlpack::Managed managed;
  int64_t shape[kMaxDims], strides[kMaxDims];
  size_t bytes;
  std::shared_ptr<Arena> arena;  // null for a mapping of its own
  void* block;                   // in the arena
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

// Returns the distance between two of m rows, in elements: if a row is an even number of cache lines long, one line
// more than the row. Few rows are read in another way (linear/stream_amx-inl.h).
size_t row_distance(int64_t m, size_t elements, const DTypeName& type) {
  constexpr int64_t kFewRows = 16;
  const size_t line = size_t{64} * 8 / type.bits;
  return m > kFewRows && elements != 0 && elements % (2 * line) == 0 ? elements + line : elements;
}

// Returns an owner with sizes and strides: contiguous, except that `apart` sets the distance of rows.
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

// Returns bytes in pages from `map`, which are unmapped with the last tensor over them.
template <class Map>
py::object import_pages(int64_t bytes, Map map) {
  const DTypeName& type = kDTypes[static_cast<int>(DType::u8)];
  auto owner = make_owner({bytes}, type);
  void* const data = map(owner->bytes);
  return import_tensor(std::move(owner), data, 1, {type.code, type.bits, 1}, [](dlpack::Managed* managed) {
    auto* owner = static_cast<Owner*>(managed->context);
    unmap_pages(managed->tensor.data, owner->bytes);
    delete owner;
  });
}

}  // namespace

void attach_tensors(py::type tensor, const py::list& dtypes) {
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

uint32_t find_tensor(PyObject* object, const char* where, Tensor& tensor) {
  const dlpack::Tensor raw = borrow(object, where);
  const DTypeName* const known = find_dtype(raw.dtype);
  if (!known) return 0;
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
  return uint32_t{1} << (known - kDTypes);
}

uint32_t find_dtypes(PyObject* object) {
  uint32_t found = 0;
  if (PyTuple_Check(object)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) found |= find_dtypes(PyTuple_GET_ITEM(object, i));
  }
  for (size_t i = 0; i < dtype_objects.size(); ++i) {
    if (dtype_objects[i] == object) found |= uint32_t{1} << i;
  }
  return found;
}

Tensor read_tensor(PyObject* object, const char* where) {
  Tensor tensor{};
  if (object != Py_None && !find_tensor(object, where, tensor)) {
    throw Error(std::string(where) + ": a tensor has a dtype that no kernel supports");
  }
  return tensor;
}

py::object empty(const std::shared_ptr<Arena>& arena, const std::vector<int64_t>& shape, int dtype, bool apart) {
  const DTypeName& type = kDTypes[dtype];
  auto owner = make_owner(shape, type, apart);
  owner->arena = arena;
  void* const data = owner->block = owner->arena->allocate(owner->bytes);
  return import_tensor(std::move(owner), data, shape.size(), {type.code, type.bits, 1}, give_back);
}

py::object view(const std::shared_ptr<Arena>& arena, const py::object& of, const std::vector<int64_t>& shape,
                const std::vector<int64_t>& strides, int64_t first) {
  const dlpack::Tensor raw = borrow(of.ptr(), "view");
  char* const data = static_cast<char*>(raw.data) + raw.byte_offset + first * (raw.dtype.bits / 8);
  if (shape.size() != strides.size() || shape.size() > kMaxDims) throw Error("view: expected as many strides as sizes");
  void* const block = arena->hold(data);
  if (!block) return py::none();
  auto owner = std::make_unique<Owner>();
  std::copy(shape.begin(), shape.end(), owner->shape);
  std::copy(strides.begin(), strides.end(), owner->strides);
  owner->arena = arena;
  owner->block = block;
  return import_tensor(std::move(owner), data, shape.size(), raw.dtype, give_back);
}

py::object alias(const std::shared_ptr<Arena>& arena, const py::object& of) {
  const dlpack::Tensor raw = borrow(of.ptr(), "Graph");
  char* const data = static_cast<char*>(raw.data) + raw.byte_offset;
  const bool hollow = std::count(raw.shape, raw.shape + raw.ndim, 0) > 0;  // such a tensor has no address
  if (raw.ndim > kMaxDims || !(hollow || arena->contains(data))) {
    throw Error("Graph: expected the recorded step to return what a kernel made, found another tensor");
  }
  auto owner = std::make_unique<Owner>();
  std::copy_n(raw.shape, raw.ndim, owner->shape);
  std::copy_n(raw.strides, raw.ndim, owner->strides);
  owner->arena = arena;
  return import_tensor(std::move(owner), data, static_cast<size_t>(raw.ndim), raw.dtype,
                       [](dlpack::Managed* managed) { delete static_cast<Owner*>(managed->context); });
}

py::object alloc(int64_t bytes) { return import_pages(bytes, map_pages); }

py::object map_bytes(int file, int64_t bytes, bool writable) {
  return import_pages(bytes, [=](size_t size) { return map_file(file, size, writable); });
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

}  // namespace tilerank
