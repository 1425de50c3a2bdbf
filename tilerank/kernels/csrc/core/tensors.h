// Tensors that cross between Python and C++ through DLPack, in both directions.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "core/arena.h"
#include "core/dlpack.h"
#include "core/kernel.h"

namespace tilerank {

namespace py = pybind11;

struct DTypeName {
  DType dtype;
  uint8_t code, bits;  // DLPack code and size
  const char* name;    // name in torch
};
inline constexpr DTypeName kDTypes[] = {
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

// Sets the tensor type whose instances are accepted and returned, and torch's dtypes in the order of kDTypes. Must be
// called before all other functions. Throws Error if the type does not support DLPack.
void attach_tensors(py::type tensor, const py::list& dtypes);

// Returns the tensor's memory and layout without taking ownership. Throws Error, whose sentence begins with `where`,
// for anything but a CPU tensor.
dlpack::Tensor borrow(PyObject* object, const char* where);

// Sets `tensor` and returns the bit of its dtype in the order of kDTypes, or 0 if no kernel supports the dtype.
uint32_t find_tensor(PyObject* object, const char* where, Tensor& tensor);

// Returns the bits of a dtype of torch, or of a tuple of them.
uint32_t find_dtypes(PyObject* object);

// Returns the tensor as an argument of a kernel; None becomes a tensor without memory.
Tensor read_tensor(PyObject* object, const char* where);

// Returns a tensor with undefined content in memory of the arena. `apart`: if rows are an even number of cache lines
// long, they get one line more from each to the next, so that they do not fall into the same sets of the cache.
py::object empty(const std::shared_ptr<Arena>& arena, const std::vector<int64_t>& shape, int dtype, bool apart);

// Returns a view of a tensor of the arena, which begins `first` elements later, or None if its memory is not in the
// arena. torch's own views cost several times as much, and more during a recording.
py::object view(const std::shared_ptr<Arena>& arena, const py::object& of, const std::vector<int64_t>& shape,
                const std::vector<int64_t>& strides, int64_t first);

// Returns a tensor over the same memory that does not hold the block in the arena, which may be reused while this
// tensor lives.
py::object alias(const std::shared_ptr<Arena>& arena, const py::object& of);

// Returns zeroed bytes in a mapping of their own (map_pages).
py::object alloc(int64_t bytes);

// Returns the first bytes of a memory file (map_file).
py::object map_bytes(int file, int64_t bytes, bool writable);

// Drops the tensor's pages, which must be in a file mapping, from resident memory (drop_file_pages).
void drop_pages(const py::object& tensor);

}  // namespace tilerank
