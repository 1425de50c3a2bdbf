// The tiles of simd/amx-inl.h as functions that test_amx.py calls through ctypes. They return 0, or 1 with the sentence
// of an Error in `message`.
#ifndef TR_RUNG
#define TR_ONLY_AMX
#define TR_SOURCE "amx_test.cpp"
#include "simd/foreach_isa.h"

#else
#include "simd/amx-inl.h"

namespace tilerank::TR_RUNG {
namespace {

constexpr size_t kMessageBytes = 512;

// Copies a configuration from memory of any alignment.
TileConfig read_config(const void* operand) {
  TileConfig config;
  std::memcpy(static_cast<void*>(&config), operand, sizeof(config));
  return config;
}

template <class F>
int report(char* message, F&& f) {
  try {
    f();
    return 0;
  } catch (const Error& error) {
    std::strncpy(message, error.what(), kMessageBytes - 1);
    return 1;
  }
}

}  // namespace

extern "C" {

int configure(const void* config, char* message) {
  return report(message, [&] { const Tiles tiles(read_config(config)); });
}

// C += A * B as tiles 0, 1 and 2 of the given shapes, whose rows are `stride` bytes apart in memory.
int multiply(const void* config, int int8, void* c, const void* a, const void* b, int64_t stride, char* message) {
  return report(message, [&] {
    const Tiles tiles(read_config(config));
    tile_load<0>(c, stride);
    tile_load_stream<1>(a, stride);
    tile_load_rows_stream<2>(b, stride);
    if (int8) {
      tile_dot_int8<0, 1, 2>();
    } else {
      tile_dot_bf16<0, 1, 2>();
    }
    tile_store<0>(c, stride);
  });
}

// Adds the product twice, through blocks of 1,024 bytes: first to zeros, then to the result.
int multiply_blocks(const void* config, void* c, const void* a, const void* b, char* message) {
  return report(message, [&] {
    const Tiles tiles(read_config(config));
    tile_zero<0>();
    tile_load_block<1>(a);
    tile_load_block_stream<2>(b);
    tile_dot_bf16<0, 1, 2>();
    tile_store_block<0>(c);
    tile_load_block<3>(c);
    tile_dot_bf16<3, 1, 2>();
    tile_store_block<3>(c);
  });
}

int use_without_configuration(char* message) {
  return report(message, [] { tile_zero<0>(); });
}

int use_after_release(const void* config, void* c, char* message) {
  return report(message, [&] {
    {
      const Tiles tiles(read_config(config));
    }
    tile_store<0>(c, 64);
  });
}

int multiply_tile_by_itself(const void* config, char* message) {
  return report(message, [&] {
    const Tiles tiles(read_config(config));
    tile_dot_bf16<0, 1, 1>();
  });
}

}  // extern "C"

}  // namespace tilerank::TR_RUNG
#endif
