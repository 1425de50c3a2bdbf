// Prefetches of weights, compiled once per rung (no include guard; include after core/cpu.h).

namespace tilerank::TR_RUNG {

// Prefetches a line of a weight that R rows are multiplied with, and for a few rows one far behind it.
template <int R>
[[gnu::always_inline]] static inline void prefetch_weight(const char* at) {
  _mm_prefetch(at, _MM_HINT_T0);
  if constexpr (kLanes == 16 && R <= kRowsAhead) _mm_prefetch(at + far_ahead, _MM_HINT_T1);
}

}  // namespace tilerank::TR_RUNG
