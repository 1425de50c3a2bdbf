// store_kv: writes the keys and values of tokens into the pages of the cache (kv_pages.h). expanded_pages: the same for
// keys that end with dims which all heads share.
#ifndef TR_RUNG
#include <array>
#include <type_traits>

#include "attention/kv_pages.h"
#include "core/entry.h"
#include "linear/pack.h"
#include "rows/rows.h"
#define TR_SOURCE "attention/store_kv.cpp"
#include "simd/foreach_isa.h"
#else
#include "simd/blocks-inl.h"
#include "linear/int8_rows-inl.h"
#include "simd/transpose-inl.h"

namespace tilerank::TR_RUNG {

[[maybe_unused]] constexpr int64_t kStreamBytes = 1 << 20;  // larger inputs exceed the caches

// Rows of neighbouring tokens, `stride` elements apart, with `dims` elements each.
template <class T>
struct TokenRows {
  const T* at;
  int64_t stride, dims;
};

// Stores a token's key, or the part of it that begins at `keys`; d: all dims of a key.
template <class T>
static void store_key(const T* k, int64_t dims, T* keys, int64_t d, int64_t offset) {
  constexpr int64_t x = kPair<T>;
  T* key = keys + offset / 16 * 16 * d + offset % 16 * x;
  for (int64_t i = 0; i < dims; i += x) std::memcpy(key + i * 16, k + i, x * sizeof(T));
}

template <class T>
static void store_value(const T* v, int64_t d, T* values, int64_t offset) {
  constexpr int64_t x = kPair<T>;
  T* value = values + offset / x * 16 * x + offset % x;
  for (; d >= 16; d -= 16, v += 16, value += 16 * kPageTokens) {
    for (int64_t i = 0; i < 16; ++i) value[i * x] = v[i];
  }
  for (int64_t i = 0; d > 0 && i < 16; ++i) value[i * x] = i < d ? v[i] : T{};
}

// Prefetches the cache lines that a token's keys and values are written to. Each token fills parts of many lines, and
// stores alone keep only few line reads in flight.
template <class T>
static void fetch_token(const T* k_page, int64_t key_dims, const T* v_page, int64_t value_dims, int64_t offset) {
  constexpr int64_t line = 64 / sizeof(T);
  const T* const keys = k_page + offset / 16 * 16 * key_dims;
  for (int64_t i = 0; i < key_dims * 16; i += line) _mm_prefetch(reinterpret_cast<const char*>(keys + i), _MM_HINT_T1);
  for (int64_t i = 0; i < value_dims; i += 16) {
    const T* const pair = v_page + i * kPageTokens + offset / kPair<T> * 16 * kPair<T>;
    _mm_prefetch(reinterpret_cast<const char*>(pair), _MM_HINT_T1);
  }
}

#ifdef TR_AVX512
// Loads the first n values of a row, at most a vector of them, then zeros.
template <class T>
static inline __m512i load_values(const T* p, int64_t n) {
  const int64_t bytes = std::min<int64_t>(n * static_cast<int64_t>(sizeof(T)), 64);
  return _mm512_maskz_loadu_epi8(~uint64_t{0} >> (64 - bytes), p);
}

// Stores one 32-bit word of each of 16 tokens in the order of a page, only those of the tokens `own`.
template <bool Streams, class T>
static inline void store_words(T* to, __m512i words, __mmask16 own) {
  if (Streams && own == 0xffff) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), words);
  } else {
    _mm512_mask_storeu_epi32(to, own, words);
  }
}
template <bool Streams>
static inline void store_words(int8_t* to, __m512i words, __mmask16 own) {
  // Each token has two pairs here: the first pairs of all tokens precede the second pairs.
  alignas(64) static constexpr uint16_t kPairs[32] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                                      1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
  const __m512i pairs = _mm512_permutexvar_epi16(_mm512_load_si512(kPairs), words);
  _mm512_mask_storeu_epi16(to, static_cast<__mmask32>(own) | static_cast<__mmask32>(own) << 16, pairs);
}

// Stores up to 16 dims of the values of two tokens side by side; null: that token is not stored.
template <bool Streams>
static inline void store_pair(bf16* to, const bf16* even, const bf16* odd, int64_t n) {
  const auto words = [&](const bf16* p) {
    return p ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(n), p)) : _mm512_setzero_si512();
  };
  const __m512i pairs = _mm512_or_si512(words(even), _mm512_slli_epi32(words(odd), 16));
  if (Streams && even && odd) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), pairs);
  } else {
    _mm512_mask_storeu_epi16(to, (even ? 0x55555555u : 0) | (odd ? 0xaaaaaaaau : 0), pairs);
  }
}
template <bool Streams>
static inline void store_pair(int8_t* to, const int8_t* even, const int8_t* odd, int64_t n) {
  const auto words = [&](const int8_t* p) {
    return p ? _mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(first_lanes(n), p)) : _mm256_setzero_si256();
  };
  const __m256i pairs = _mm256_or_si256(words(even), _mm256_slli_epi16(words(odd), 8));
  _mm256_mask_storeu_epi8(to, (even ? 0x55555555u : 0) | (odd ? 0xaaaaaaaau : 0), pairs);
}

// The following two store `count` neighbouring tokens of 16. Streams: whole lines are written with non-temporal stores,
// which do not read them first.
template <bool Streams, class T>
static void store_keys_together(const TokenRows<T>& k, int64_t count, T* keys, int64_t d, int64_t offset) {
  constexpr int64_t kInWord = 4 / sizeof(T);
  const int64_t lane = offset % 16;
  keys += offset / 16 * 16 * d;
  const __mmask16 own = static_cast<__mmask16>(((1u << count) - 1) << lane);
  for (int64_t i = 0; i < k.dims; i += 16 * kInWord) {
    __m512i rows[16], columns[16];
    for (int64_t token = 0; token < 16; ++token) {
      const int64_t t =
          std::clamp<int64_t>(token - lane, 0, count - 1);  // lanes of tokens that are not stored repeat others
      rows[token] = load_values(k.at + t * k.stride + i, k.dims - i);
    }
    transpose(rows, columns);
    const int64_t words = std::min<int64_t>(16, (k.dims - i) / kInWord);
    for (int64_t w = 0; w < words; ++w) store_words<Streams>(keys + (i + w * kInWord) * 16, columns[w], own);
  }
}
template <bool Streams, class T>
static void store_values_together(const TokenRows<T>& v, int64_t count, T* values, int64_t offset) {
  for (int64_t i = 0; i < v.dims; i += 16) {
    const int64_t n = std::min<int64_t>(16, v.dims - i);
    if constexpr (kPair<T> == 1) {
      for (int64_t t = 0; t < count; ++t) {
        store_words<Streams>(values + i * kPageTokens + (offset + t) * 16, load_values(v.at + t * v.stride + i, n),
                             0xffff);
      }
    } else {
      const auto token = [&](int64_t t) { return t >= 0 && t < count ? v.at + t * v.stride + i : nullptr; };
      for (int64_t t = -(offset % 2); t < count; t += 2) {
        store_pair<Streams>(values + i * kPageTokens + (offset + t) * 16, token(t), token(t + 1), n);
      }
    }
  }
}
#endif

[[maybe_unused]] constexpr int64_t kTogether = 4;  // tokens; a token alone costs as much as 16 together

// The following two store `count` tokens that are neighbours within 16 tokens of a page, from `offset` on.
template <class T>
static void store_keys(const TokenRows<T>& k, int64_t count, T* keys, int64_t d, int64_t offset,
                       [[maybe_unused]] bool streams) {
#ifdef TR_AVX512
  if (count >= kTogether) {
    const auto store = streams ? store_keys_together<true, T> : store_keys_together<false, T>;
    return store(k, count, keys, d, offset);
  }
#endif
  for (int64_t i = 0; i < count; ++i) store_key(k.at + i * k.stride, k.dims, keys, d, offset + i);
}
template <class T>
static void store_values(const TokenRows<T>& v, int64_t count, T* values, int64_t offset,
                         [[maybe_unused]] bool streams) {
#ifdef TR_AVX512
  if (count >= kTogether) {
    const auto store = streams ? store_values_together<true, T> : store_values_together<false, T>;
    return store(v, count, values, offset);
  }
#endif
  for (int64_t i = 0; i < count; ++i) store_value(v.at + i * v.stride, v.dims, values, offset + i);
}

struct StoredTokens {
  const Tensor &k, &v, &k_pages, &v_pages;
  const Tensor& slots;   // or none: token i goes to slot i
  const Tensor& scales;  // of int8 pages, or none
  const Tensor& tail;    // [tokens, dims], the last dims of the keys of all heads, or none
};

// T: dtype of k and v, P: dtype of the pages.
template <class T, class P>
static void store_all(const StoredTokens& stored, Team& team) {
  constexpr bool kCodes = !std::is_same_v<T, P>;
  const Tensor &k = stored.k, &v = stored.v, &k_pages = stored.k_pages, &v_pages = stored.v_pages;
  const Tensor &slots = stored.slots, &scales = stored.scales, &tail = stored.tail;
  const int64_t tokens = k.size[0], heads = k.size[1], value_dims = v.size[2];
  const int64_t key_dims = k.size[2] + (tail ? tail.size[1] : 0);
  // Pages consist of whole cache lines if they begin with one, except that a row of int8 pairs is half a line.
  const auto in_lines = [](const Tensor& pages) { return reinterpret_cast<uintptr_t>(pages.as<char>()) % 64 == 0; };
  const bool streams = !kCodes &&
                       tokens * heads * (key_dims + value_dims) * static_cast<int64_t>(sizeof(P)) >= kStreamBytes &&
                       in_lines(k_pages) && in_lines(v_pages);
  const auto slot_of = [&](int64_t token) { return slots ? slots.as<int64_t>()[token * slots.stride[0]] : token; };
  const auto keys_of = [&](int64_t page, int64_t head) { return k_pages.row<P>(page) + head * k_pages.stride[1]; };
  const auto values_of = [&](int64_t page, int64_t head) { return v_pages.row<P>(page) + head * v_pages.stride[1]; };
  // Returns how many tokens, from this one on, are neighbours within 16 tokens of a page.
  const auto neighbours = [&](int64_t token, int64_t end) {
    const int64_t slot = slot_of(token), most = std::min(end - token, 16 - slot % 16);
    int64_t count = 1;
    while (count < most && slot_of(token + count) == slot + count) ++count;
    return count;
  };
  // Tokens are split over threads as in the kernels before, whose caches hold the rows; few tokens are split by heads.
  constexpr int64_t kTokens = 64;
  const auto [first, last] = team.share(blocks(tokens, kTokens) * heads);
  if (tokens <= kTokens) {
    for (int64_t head = first; head < last; ++head) {
      for (int64_t token = 0; token < tokens; ++token) {
        const int64_t page = slot_of(token) / kPageTokens;
        fetch_token(keys_of(page, head), key_dims, values_of(page, head), value_dims, slot_of(token) % kPageTokens);
      }
    }
  }
  for (int64_t item = first; item < last; ++item) {
    const int64_t head = item % heads, end = std::min((item / heads + 1) * kTokens, tokens);
    int64_t count = 0;
    for (int64_t token = item / heads * kTokens; token < end; token += count) {
      count = neighbours(token, end);
      const int64_t page = slot_of(token) / kPageTokens, offset = slot_of(token) % kPageTokens;
      const TokenRows<T> key{k.row<T>(token) + head * k.stride[1], k.stride[0], k.size[2]};
      const TokenRows<T> value{v.row<T>(token) + head * v.stride[1], v.stride[0], value_dims};
      P *const keys = keys_of(page, head), *const values = values_of(page, head);
      if constexpr (kCodes) {
        constexpr int64_t kMost = 256;  // dims
        alignas(64) int8_t codes[2][16][kMost];
        float* const scale = scales.row<float>(page) + head * scales.stride[1] + offset;
        for (int64_t i = 0; i < count; ++i) {
          const auto quantise = [&](const TokenRows<T>& from, int8_t* to) {
            return quantise_row(from.at + i * from.stride, from.dims, [&](int64_t t) { return to + 64 * t; });
          };
          scale[i] = quantise(key, codes[0][i]);
          scale[kPageTokens + i] = quantise(value, codes[1][i]);
        }
        store_keys({codes[0][0], kMost, key_dims}, count, keys, key_dims, offset, streams);
        store_values({codes[1][0], kMost, value_dims}, count, values, offset, streams);
      } else {
        store_keys(key, count, keys, key_dims, offset, streams);
        if (tail) {
          const TokenRows<T> rest{tail.row<T>(token), tail.stride[0], tail.size[1]};
          store_keys(rest, count, keys + key.dims * 16, key_dims, offset, streams);
        }
        store_values(value, count, values, offset, streams);
      }
    }
  }
#ifdef TR_AVX512
  if (streams) _mm_sfence();
#endif
}

TR_ENTRY(store_kv, Team& team, const Tensor& k, const Tensor& v, const Tensor& cache_k, const Tensor& cache_v,
         const Tensor& cache_scales, const Tensor& slots) {
  check_indices("store_kv: slots", slots, cache_k.size[0] * kPageTokens);
  for_float(k.dtype, [&](auto type) {
    using T = decltype(type);
    const StoredTokens stored{k, v, cache_k, cache_v, slots, cache_scales, Tensor{}};
    cache_scales ? store_all<T, int8_t>(stored, team) : store_all<T, T>(stored, team);
  });
}

TR_ENTRY(expanded_pages, Team& team, const Tensor& k, const Tensor& v, const Tensor& rope_key, const Tensor& cache_k,
         const Tensor& cache_v) {
  for_float(k.dtype, [&](auto type) {
    using T = decltype(type);
    store_all<T, T>({k, v, cache_k, cache_v, Tensor{}, Tensor{}, rope_key}, team);
  });
}

}  // namespace tilerank::TR_RUNG
#endif
