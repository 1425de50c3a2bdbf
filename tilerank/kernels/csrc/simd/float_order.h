// Floats as integers of the same order.
#pragma once
#include <cstdint>
#include <cstring>

namespace tilerank {

// Maps floats to integers of the same order; both zeros become equal. Integer maxima are associative, so the compiler
// can vectorise them. NaNs of positive sign are above +inf, those of negative sign below -inf. Always inlined, into the
// code of each rung.
[[gnu::always_inline]] inline int32_t ordered(float x) {
  int32_t bits;
  x += 0.0f;
  std::memcpy(&bits, &x, 4);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
// Returns the float that ordered() maps to `value`.
[[gnu::always_inline]] inline float from_ordered(int32_t value) {
  const int32_t bits = value ^ ((value >> 31) & 0x7fffffff);
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
constexpr int32_t ordered_infinity = 0x7f800000;  // ordered(inf); ~ordered_infinity is ordered(-inf)

}  // namespace tilerank
