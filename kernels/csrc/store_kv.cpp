// store_kv: transposes tokens into the pages (layouts: KVLayer in attention.py).
#ifndef TR_RUNG
#include "rows.h"
#define TR_SOURCE "store_kv.cpp"
#include "foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

constexpr int64_t kBlock = 32;  // tokens in a page

// x values that the tiles sum together lie side by side: two bf16 or one float, so one 32-bit word for keys.
template <class T>
static void store_token(const T* k, const T* v, T* k_page, T* v_page, int64_t d, int64_t offset) {
  constexpr int64_t x = 4 / sizeof(T);
  T* key = k_page + offset / 16 * 16 * d + offset % 16 * x;
  for (int64_t i = 0; i < d; i += x) std::memcpy(key + i * 16, k + i, 4);
  T* value = v_page + offset / x * 16 * x + offset % x;
  const int64_t padded = (d + 15) / 16 * 16;
  for (int64_t i = 0; i < padded; ++i) value[i / 16 * 16 * kBlock + i % 16 * x] = i < d ? v[i] : T{};
}

// tensors: k, v, k pages [blocks, heads, ...], v pages, slots
static void store_kv(const Args& args, Team& team) {
  const Tensor &k = args.tensor(0), &v = args.tensor(1), &k_pages = args.tensor(2), &v_pages = args.tensor(3),
               &slots = args.tensor(4);
  check_indices("store_kv: slots", slots, k_pages.size[0] * kBlock);
  const int64_t tokens = k.size[0], heads = k.size[1], d = k.size[2];
  for_float(k.dtype, [&](auto type) {
    using T = decltype(type);
    // Neighbouring tokens share cache lines of a page, so a thread takes whole heads first.
    const auto [first, last] = team.share(heads * tokens);
    for (int64_t item = first; item < last; ++item) {
      const int64_t head = item / tokens, token = item % tokens;
      const int64_t slot = slots.as<int64_t>()[token * slots.stride[0]];
      store_token(k.row<T>(token) + head * k.stride[1], v.row<T>(token) + head * v.stride[1],
                  k_pages.row<T>(slot / kBlock) + head * k_pages.stride[1],
                  v_pages.row<T>(slot / kBlock) + head * v_pages.stride[1], d, slot % kBlock);
    }
  });
}
TR_KERNEL(store_kv)

}  // namespace tilerank::TR_RUNG
#endif
