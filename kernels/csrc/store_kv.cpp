// store_kv: transposes tokens into the pages (layouts: KVLayer in attention.py).
#ifndef TR_RUNG
#include <type_traits>

#include "pack.h"
#include "rows.h"
#define TR_SOURCE "store_kv.cpp"
#include "foreach_isa.h"
#else
#include "transpose.h"

namespace tilerank::TR_RUNG {

constexpr int64_t kBlock = 32;                              // tokens in a page
[[maybe_unused]] constexpr int64_t kStreamBytes = 1 << 20;  // keys and values that are more leave the caches anyway

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

// The cache lines of pages that a token's keys and values go to, for tokens whose pages lie in memory: each fills a
// part of many lines, and stores alone have few of them on the way at a time.
template <class T>
static void fetch_token(const T* k_page, const T* v_page, int64_t d, int64_t offset) {
  constexpr int64_t x = 4 / sizeof(T), line = 16 * x;
  const T* const keys = k_page + offset / 16 * 16 * d;
  for (int64_t i = 0; i < d; i += x) _mm_prefetch(reinterpret_cast<const char*>(keys + i * 16), _MM_HINT_T1);
  for (int64_t i = 0; i < d; i += 16) {
    _mm_prefetch(reinterpret_cast<const char*>(v_page + i * kBlock + offset / x * line), _MM_HINT_T1);
  }
}

#ifdef TR_AVX512
// streams: whole lines go past the caches, where they would leave these anyway. Otherwise each is read from memory
// before it is written.
template <bool Streams>
static void store_neighbours(const bf16* k, int64_t k_stride, const bf16* v, int64_t v_stride, int64_t count,
                             bf16* k_page, bf16* v_page, int64_t d, int64_t offset) {
  const int64_t lane = offset % 16;
  // Keys: pairs of dims of 16 tokens side by side.
  bf16* const keys = k_page + offset / 16 * 16 * d;
  const __mmask16 own = static_cast<__mmask16>(((1u << count) - 1) << lane);
  for (int64_t i = 0; i < d; i += 32) {
    const int64_t dims = std::min<int64_t>(32, d - i);
    const __mmask32 there = static_cast<__mmask32>((uint64_t{1} << dims) - 1);
    __m512i rows[16], pairs[16];
    for (int64_t token = 0; token < 16; ++token) {
      const int64_t t = std::clamp<int64_t>(token - lane, 0, count - 1);  // the others are not stored
      rows[token] = _mm512_maskz_loadu_epi16(there, k + t * k_stride + i);
    }
    transpose(rows, pairs);
    for (int64_t pair = 0; pair < 16; ++pair) {
      if (2 * pair >= dims) break;
      bf16* const to = keys + (i + 2 * pair) * 16;
      if (Streams && count == 16) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), pairs[pair]);
      } else {
        _mm512_mask_storeu_epi32(to, own, pairs[pair]);
      }
    }
  }
  // Values: pairs of tokens of 16 dims side by side.
  for (int64_t i = 0; i < d; i += 16) {
    const __mmask16 there = first_lanes(std::min<int64_t>(16, d - i));
    const auto words = [&](int64_t t) {
      return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, v + t * v_stride + i));
    };
    for (int64_t t = -(offset % 2); t < count; t += 2) {
      const bool even = t >= 0, odd = t + 1 < count;
      __m512i pair = even ? words(t) : _mm512_setzero_si512();
      if (odd) pair = _mm512_or_si512(pair, _mm512_slli_epi32(words(t + 1), 16));
      const __mmask32 halves = (even ? 0x55555555u : 0) | (odd ? 0xaaaaaaaau : 0);
      bf16* const to = v_page + i * kBlock + (offset + t) / 2 * 32;
      if (Streams && even && odd) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), pair);
      } else {
        _mm512_mask_storeu_epi16(to, halves, pair);
      }
    }
  }
}
#endif

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

// `count` tokens, `stride` elements apart, that are neighbours among 16 of a page, from `offset` on.
template <class T>
static void store_tokens(const T* k, int64_t k_stride, const T* v, int64_t v_stride, int64_t count, T* k_page,
                         T* v_page, int64_t d, int64_t offset, [[maybe_unused]] bool streams) {
#ifdef TR_AVX512
  if constexpr (std::is_same_v<T, bf16>) {
    constexpr int64_t kWorth = 4;  // tokens: each costs as much as 16 of them do together, or less
    if (count >= kWorth) {
      const auto store = streams ? store_neighbours<true> : store_neighbours<false>;
      return store(k, k_stride, v, v_stride, count, k_page, v_page, d, offset);
    }
  }
#endif
  for (int64_t i = 0; i < count; ++i) store_token(k + i * k_stride, v + i * v_stride, k_page, v_page, d, offset + i);
}

// tensors: k, v, k pages [blocks, heads, ...], v pages, slots, scales of int8 pages or none
static void store_kv(const Args& args, Team& team) {
  const Tensor &k = args.tensor(0), &v = args.tensor(1), &k_pages = args.tensor(2), &v_pages = args.tensor(3),
               &slots = args.tensor(4), &scales = args.tensor(5);
  check_indices("store_kv: slots", slots, k_pages.size[0] * kBlock);
  const int64_t tokens = k.size[0], heads = k.size[1], d = k.size[2];
  // Pages consist of whole lines if they begin with one.
  const auto in_lines = [](const Tensor& pages) { return reinterpret_cast<uintptr_t>(pages.as<char>()) % 64 == 0; };
  const bool streams = 2 * tokens * heads * d * 2 >= kStreamBytes && in_lines(k_pages) && in_lines(v_pages);
  const auto slot_of = [&](int64_t token) { return slots.as<int64_t>()[token * slots.stride[0]]; };
  // How many tokens from this one on are neighbours among 16 of a page.
  const auto neighbours = [&](int64_t token, int64_t end) {
    const int64_t slot = slot_of(token), most = std::min(end - token, 16 - slot % 16);
    int64_t count = 1;
    while (count < most && slot_of(token + count) == slot + count) ++count;
    return count;
  };
  for_float(k.dtype, [&](auto type) {
    using T = decltype(type);
    // Rows stay with the thread that computed them; of a few tokens every thread takes some heads.
    constexpr int64_t kTokens = 64;
    const auto [first, last] = team.share(blocks(tokens, kTokens) * heads);
    if (tokens <= kTokens && !scales) {
      for (int64_t head = first; head < last; ++head) {
        for (int64_t token = 0; token < tokens; ++token) {
          const int64_t page = slot_of(token) / kBlock;
          fetch_token(k_pages.row<T>(page) + head * k_pages.stride[1], v_pages.row<T>(page) + head * v_pages.stride[1],
                      d, slot_of(token) % kBlock);
        }
      }
    }
    for (int64_t item = first; item < last; ++item) {
      const int64_t head = item % heads, end = std::min((item / heads + 1) * kTokens, tokens);
      int64_t count = 0;
      for (int64_t token = item / heads * kTokens; token < end; token += count) {
        count = scales ? 1 : neighbours(token, end);
        const int64_t page = slot_of(token) / kBlock, offset = slot_of(token) % kBlock;
        const T *const key = k.row<T>(token) + head * k.stride[1], *const value = v.row<T>(token) + head * v.stride[1];
        if (scales) {
          alignas(64) int8_t codes[2][256];
          float* const scale = scales.row<float>(page) + head * scales.stride[1] + offset;
          scale[0] = quantize(key, d, codes[0]);
          scale[kBlock] = quantize(value, d, codes[1]);
          store_codes(codes[0], codes[1], k_pages.row<int8_t>(page) + head * k_pages.stride[1],
                      v_pages.row<int8_t>(page) + head * v_pages.stride[1], k_pages.size[3] / 16, d, offset);
          continue;
        }
        store_tokens(key, k.stride[0], value, v.stride[0], count, k_pages.row<T>(page) + head * k_pages.stride[1],
                     v_pages.row<T>(page) + head * v_pages.stride[1], d, offset, streams);
      }
    }
  });
#ifdef TR_AVX512
  if (streams) _mm_sfence();
#endif
}
TR_KERNEL(store_kv)

}  // namespace tilerank::TR_RUNG
#endif
