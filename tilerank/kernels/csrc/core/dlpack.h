// The part of DLPack 1.x (https://github.com/dmlc/dlpack, Apache-2.0) through which tensors enter this library. It is
// declared here so that building does not need torch. torch offers it as torch.Tensor.__dlpack_c_exchange_api__.
#pragma once
#include <cstdint>

namespace tilerank::dlpack {

constexpr uint32_t kMajor = 1;
constexpr uint32_t kMinor = 3;  // the first version whose exchange table has the layout below
constexpr int32_t kCpu = 1;

struct Version {
  uint32_t major, minor;
};
struct Device {
  int32_t type, id;
};
struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};
struct Managed {
  Version version;
  void* context;
  void (*deleter)(Managed*);
  uint64_t flags;
  Tensor tensor;
};
struct Header {
  Version version;
  Header* previous;
};
struct Exchange {
  Header header;
  int (*allocate)(Tensor*, Managed**, void*, void (*)(void*, const char*, const char*));
  int (*export_managed)(void* object, Managed** out);
  int (*import_managed)(Managed* tensor, void** object);  // takes ownership of the tensor
  int (*borrow)(void* object, Tensor* out);               // valid while the object lives unchanged
  int (*stream)(int32_t, int32_t, void**);
};

}  // namespace tilerank::dlpack
