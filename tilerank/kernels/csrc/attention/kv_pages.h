// The pages of the KV cache (layout: KVPages in kernels/kv_pages.py).
#pragma once
#include <cstdint>

namespace tilerank {

constexpr int64_t kPageTokens = 32;  // tokens in a page

// Values that lie side by side in a page and are summed together: two bf16 or two codes, or one float.
template <class T>
constexpr int64_t kPair = sizeof(T) == 4 ? 1 : 2;

}  // namespace tilerank
