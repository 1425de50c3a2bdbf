// store_latent and load_latent: the rows of the latent cache (layout: LatentPages in kernels/latent_pages.py).
#ifndef TR_RUNG
#include <type_traits>

#include "attention/kv_pages.h"
#include "linear/pack.h"
#include "rows/rows.h"
#define TR_SOURCE "latent/latent_rows.cpp"
#include "simd/foreach_isa.h"
#else
#include "linear/int8_rows-inl.h"

namespace tilerank::TR_RUNG {

// tensors: latent, rope_key, data [pages, tokens, width], slots, scales of int8 pages or none. T: dtype of latent, P:
// dtype of the pages.
template <class T, class P>
static void store_rows(const Args& args, Team& team) {
  const Tensor &latent = args.tensor(0), &rope_key = args.tensor(1), &data = args.tensor(2), &slots = args.tensor(3),
               &scales = args.tensor(4);
  const int64_t dims = latent.size[1], rope_dims = rope_key.size[1], width = data.size[2];
  const auto [first, last] = team.share(slots.size[0]);
  for (int64_t token = first; token < last; ++token) {
    const int64_t slot = slots.as<int64_t>()[token * slots.stride[0]];
    const int64_t page = slot / kPageTokens, offset = slot % kPageTokens;
    P* const row = data.row<P>(page) + offset * width;
    const auto put = [&](const T* from, int64_t n, int64_t part, P* to) {
      if constexpr (std::is_same_v<T, P>) {
        std::memcpy(static_cast<void*>(to), from, static_cast<size_t>(n) * sizeof(T));
      } else {
        alignas(64) int8_t codes[512];
        scales.row<float>(page)[part * kPageTokens + offset] =
            quantise_row(from, n, [&](int64_t t) { return codes + 64 * t; });
        std::memcpy(to, codes, static_cast<size_t>(n));
      }
    };
    put(latent.row<const T>(token), dims, 0, row);
    put(rope_key.row<const T>(token), rope_dims, 1, row + dims);
    std::fill(row + dims + rope_dims, row + width, P{});
  }
}

static void store_latent(const Args& args, Team& team) {
  check_indices("store_latent: slots", args.tensor(3), args.tensor(2).size[0] * kPageTokens);
  for_float(args.tensor(0).dtype, [&](auto type) {
    using T = decltype(type);
    args.tensor(4) ? store_rows<T, int8_t>(args, team) : store_rows<T, T>(args, team);
  });
}
TR_KERNEL(store_latent)

static inline Vec load_codes(const int8_t* p) {
#ifdef TR_AVX512
  return to_vec(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  return to_vec(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#endif
}

// tensors: data, pages i32, latent, rope_key, scales of int8 pages or none. T: dtype of latent.
template <class T>
static void load_rows(const Args& args, Team& team) {
  const Tensor &data = args.tensor(0), &pages = args.tensor(1), &latent = args.tensor(2), &rope_key = args.tensor(3),
               &scales = args.tensor(4);
  const int64_t dims = latent.size[1], rope_dims = rope_key.size[1];
  const auto [first, last] = team.share(latent.size[0]);
  for (int64_t token = first; token < last; ++token) {
    const int64_t page = pages.as<int32_t>()[token / kPageTokens * pages.stride[0]], offset = token % kPageTokens;
    const auto take = [&](int64_t begin, int64_t n, int64_t part, T* to) {
      if (!scales) {
        std::memcpy(static_cast<void*>(to), data.row<T>(page) + offset * data.size[2] + begin,
                    static_cast<size_t>(n) * sizeof(T));
        return;
      }
      const int8_t* const from = data.row<int8_t>(page) + offset * data.size[2] + begin;
      const Vec scale = set(scales.row<float>(page)[part * kPageTokens + offset]);
      for_lanes(n, [&](int64_t i, auto lanes) {
        alignas(16) int8_t codes[16] = {};
        std::memcpy(codes, from + i, static_cast<size_t>(std::min<int64_t>(n - i, kLanes)));
        lanes.store(to + i, load_codes(codes) * scale);
      });
    };
    take(0, dims, 0, latent.row<T>(token));
    take(dims, rope_dims, 1, rope_key.row<T>(token));
  }
}

static void load_latent(const Args& args, Team& team) {
  const Tensor &data = args.tensor(0), &pages = args.tensor(1);
  for (int64_t i = 0; i < pages.size[0]; ++i) {
    const int32_t page = pages.as<int32_t>()[i * pages.stride[0]];
    if (page < 0 || page >= data.size[0]) {
      throw Error("load_latent: pages: expected values in [0, " + std::to_string(data.size[0]) + "), found " +
                  std::to_string(page));
    }
  }
  for_float(args.tensor(2).dtype, [&](auto type) { load_rows<decltype(type)>(args, team); });
}
TR_KERNEL(load_latent)

}  // namespace tilerank::TR_RUNG
#endif
