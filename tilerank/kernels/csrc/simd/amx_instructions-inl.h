// The tiles of amx-inl.h as the CPU's instructions.
//
// GCC up to 15 (bug 122446) emits the tile loads, stores and products of amxtileintrin.h without their memory operands
// and may move memory accesses across them. The statements here declare what they access. All are volatile, so they
// keep their order among themselves.
#pragma once

namespace tilerank::TR_RUNG {

// Configures the tiles of this thread while in scope.
class Tiles {
 public:
  explicit Tiles(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

template <int T>
static inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
static inline void tile_load(const void* p, int64_t row_stride_bytes) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(row_stride_bytes) : "memory");
}
template <int T>
static inline void tile_load_stream(const void* p, int64_t row_stride_bytes) {
  asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(row_stride_bytes) : "memory");
}
template <int T>
static inline void tile_load_rows_stream(const void* p, int64_t row_stride_bytes) {
  asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(row_stride_bytes));
}
template <int T>
static inline void tile_store(void* p, int64_t row_stride_bytes) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(row_stride_bytes) : "memory");
}
template <int T>
static inline void tile_load_block(const void* p) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(int64_t{64}),
               "m"(*static_cast<const char (*)[1024]>(p)));
}
template <int T>
static inline void tile_load_block_stream(const void* p) {
  asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(int64_t{64}),
               "m"(*static_cast<const char (*)[1024]>(p)));
}
template <int T>
static inline void tile_store_block(void* p) {
  asm volatile("tilestored %%tmm%c1, (%2,%3,1)"
               : "=m"(*static_cast<char (*)[1024]>(p))
               : "i"(T), "r"(p), "r"(int64_t{64}));
}
template <int C, int A, int B>
static inline void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
static inline void tile_dot_int8() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace tilerank::TR_RUNG
