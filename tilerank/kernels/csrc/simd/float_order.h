// Floats as integers of the same order.
#pragma once
#include <cstdint>
#include <cstring>

namespace tilerank {

// Both zeros alike. Integer maxima are associative, so the compiler can vectorise them. Every NaN of positive sign
// comes out above +inf, every other one below -inf. Always inlined, into the code of each rung.
[[gnu::always_inline]] inline int32_t ordered(float x) {
  int32_t bits;
  x += 0.0f;
  std::memcpy(&bits, &x, 4);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
constexpr int32_t ordered_infinity = 0x7f800000;  // and ~ordered_infinity is that of -inf

}  // namespace tilerank
