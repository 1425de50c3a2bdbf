// A small computation per rung that uses its main instructions and has a known result.
#pragma once
#include "core/kernel.h"

namespace tilerank {

bool self_test(Isa isa);

namespace avx2 {
bool self_test();
}
namespace avx512 {
bool self_test();
}
namespace avx512_bf16 {
bool self_test();
}
namespace amx {
bool self_test();
}

}  // namespace tilerank
