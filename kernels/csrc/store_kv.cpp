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

// The codes of a row, code = value / scale with the scale that makes the largest 127, in float so that x is 2 below;
// returns the scale.
template <class T>
static float quantize(const T* x, int64_t d, int8_t* codes) {
  float largest = 0;
  for (int64_t i = 0; i < d; ++i) largest = std::max(largest, std::fabs(to_float(x[i])));
  const float scale = largest / 127, inverse = scale > 0 ? 1 / scale : 0;
  for (int64_t i = 0; i < d; ++i) {
    codes[i] = static_cast<int8_t>(std::clamp(std::nearbyint(to_float(x[i]) * inverse), -127.0f, 127.0f));
  }
  return scale;
}

// As bf16 pages, in codes.
static void store_codes(const int8_t* k, const int8_t* v, int8_t* k_page, int8_t* v_page, int64_t key_dims, int64_t d,
                        int64_t offset) {
  int8_t* key = k_page + offset / 16 * 16 * key_dims + offset % 16 * 2;
  for (int64_t i = 0; i < d; i += 2) std::memcpy(key + i * 16, k + i, 2);
  int8_t* value = v_page + offset / 2 * 32 + offset % 2;
  const int64_t padded = (d + 15) / 16 * 16;
  for (int64_t i = 0; i < padded; ++i) value[i / 16 * 16 * kBlock + i % 16 * 2] = i < d ? v[i] : int8_t{0};
}

// tensors: k, v, k pages [blocks, heads, ...], v pages, slots, scales of int8 pages or none
static void store_kv(const Args& args, Team& team) {
  const Tensor &k = args.tensor(0), &v = args.tensor(1), &k_pages = args.tensor(2), &v_pages = args.tensor(3),
               &slots = args.tensor(4), &scales = args.tensor(5);
  check_indices("store_kv: slots", slots, k_pages.size[0] * kBlock);
  const int64_t tokens = k.size[0], heads = k.size[1], d = k.size[2];
  for_float(k.dtype, [&](auto type) {
    using T = decltype(type);
    // Neighbouring tokens share cache lines of a page, so a thread takes whole heads first.
    const auto [first, last] = team.share(heads * tokens);
    for (int64_t item = first; item < last; ++item) {
      const int64_t head = item / tokens, token = item % tokens;
      const int64_t slot = slots.as<int64_t>()[token * slots.stride[0]];
      const int64_t page = slot / kBlock, offset = slot % kBlock;
      if (scales) {
        alignas(64) int8_t codes[2][256];
        float* const scale = scales.row<float>(page) + head * scales.stride[1] + offset;
        scale[0] = quantize(k.row<T>(token) + head * k.stride[1], d, codes[0]);
        scale[kBlock] = quantize(v.row<T>(token) + head * v.stride[1], d, codes[1]);
        store_codes(codes[0], codes[1], k_pages.row<int8_t>(page) + head * k_pages.stride[1],
                    v_pages.row<int8_t>(page) + head * v_pages.stride[1], k_pages.size[3] / 16, d, offset);
        continue;
      }
      store_token(k.row<T>(token) + head * k.stride[1], v.row<T>(token) + head * v.stride[1],
                  k_pages.row<T>(slot / kBlock) + head * k_pages.stride[1],
                  v_pages.row<T>(slot / kBlock) + head * v_pages.stride[1], d, slot % kBlock);
    }
  });
}
TR_KERNEL(store_kv)

}  // namespace tilerank::TR_RUNG
#endif
