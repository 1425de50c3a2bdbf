// store_latent and load_latent: the rows of the latent cache (layout: LatentPages in kernels/latent_pages.py).
#ifndef TR_RUNG
#include <array>
#include <type_traits>

#include "attention/kv_pages.h"
#include "core/entry.h"
#include "linear/pack.h"
#include "rows/rows.h"
#define TR_SOURCE "latent/latent_rows.cpp"
#include "simd/foreach_isa.h"
#else
#include "simd/blocks-inl.h"
#include "linear/int8_rows-inl.h"

namespace tilerank::TR_RUNG {

// data: [pages, tokens, width]; scales: of int8 pages, or none. T: dtype of latent, P: dtype of the pages.
template <class T, class P>
static void store_rows(const Tensor& latent, const Tensor& rope_key, const Tensor& data, const Tensor& scales,
                       const Tensor& slots, Team& team) {
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

TR_ENTRY(store_latent, Team& team, const Tensor& latent, const Tensor& rope_key, const Tensor& cache_data,
         const Tensor& cache_scales, const Tensor& slots) {
  check_indices("store_latent: slots", slots, cache_data.size[0] * kPageTokens);
  for_float(latent.dtype, [&](auto type) {
    using T = decltype(type);
    const auto store = cache_scales ? store_rows<T, int8_t> : store_rows<T, T>;
    store(latent, rope_key, cache_data, cache_scales, slots, team);
  });
}

// The arguments are those of store_rows.
template <class T>
static void load_rows(const Tensor& data, const Tensor& scales, const Tensor& pages, const Tensor& latent,
                      const Tensor& rope_key, Team& team) {
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
        lanes.store(to + i, load(codes) * scale);
      });
    };
    take(0, dims, 0, latent.row<T>(token));
    take(dims, rope_dims, 1, rope_key.row<T>(token));
  }
}

TR_ENTRY(load_latent, Team& team, const Tensor& cache_data, const Tensor& cache_scales, const Tensor& pages,
         const Tensor& latent, const Tensor& rope_key) {
  for (int64_t i = 0; i < pages.size[0]; ++i) {
    const int32_t page = pages.as<int32_t>()[i * pages.stride[0]];
    if (page < 0 || page >= cache_data.size[0]) {
      throw Error("load_latent: pages: expected values in [0, " + std::to_string(cache_data.size[0]) + "), found " +
                  std::to_string(page));
    }
  }
  for_float(latent.dtype,
            [&](auto type) { load_rows<decltype(type)>(cache_data, cache_scales, pages, latent, rope_key, team); });
}

}  // namespace tilerank::TR_RUNG
#endif
