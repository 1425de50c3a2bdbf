#ifndef TR_RUNG
#include "core/selftest.h"

#undef TR_LEFT_OUT  // what follows is called by the name of its rung
#define TR_SOURCE "core/selftest.cpp"
#include "simd/foreach_isa.h"

namespace tilerank {
bool self_test(Isa isa) {
  switch (isa) {
    case Isa::avx2:
      return avx2::self_test();
    case Isa::avx512:
      return avx512::self_test();
    case Isa::avx512_bf16:
      return avx512_bf16::self_test();
    case Isa::amx:
      return amx::self_test();
    default:
      return true;
  }
}
}  // namespace tilerank

#else

namespace tilerank::TR_RUNG {

// Sums i * i over the lanes, through memory and bf16, which are exact for such small numbers.
bool self_test() {
  float numbers[kLanes];
  bf16 halves[kLanes];
  float expected = 0;
  for (int i = 0; i < kLanes; ++i) {
    numbers[i] = static_cast<float>(i);
    expected += static_cast<float>(i * i);
  }
  volatile float* opaque = numbers;  // not foldable at compile time
  opaque[0] = 0;
  const Vec x = load(numbers);
  store(halves, x);
  return sum(fma(load(halves), x, zero())) == expected;
}

}  // namespace tilerank::TR_RUNG
#endif
