// AMX tiles for *_amx.cpp files (inside the amx region: include after TR_RUNG is set, no include guard needed twice).
//
// GCC up to 15 (bug 122446) writes the tile loads, stores and products of amxtileintrin.h without telling the compiler
// what they read and write, so that it may move memory accesses across them. These say so: loads read memory, stores
// write it, and all are volatile, hence keep their order among themselves.
#pragma once

namespace tilerank::TR_RUNG {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int tile_rows, int row_bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    bytes_per_row[tile] = static_cast<uint16_t>(row_bytes);
  }
};
static_assert(sizeof(TileConfig) == 64);

// The tiles of this thread while in scope.
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
// Streamed once: asks not to displace what stays in cache.
template <int T>
static inline void tile_load_stream(const void* p, int64_t row_stride_bytes) {
  asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(row_stride_bytes) : "memory");
}
template <int T>
static inline void tile_store(void* p, int64_t row_stride_bytes) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(row_stride_bytes) : "memory");
}
// Tiles of 16 rows of 64 bytes that lie one after the other. These say what memory they touch, so that the compiler
// keeps what it knows in registers: for loops that mix tiles with vectors.
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
// Rows that lie apart, in memory that this kernel only reads.
template <int T>
static inline void tile_load_rows_stream(const void* p, int64_t row_stride_bytes) {
  asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(row_stride_bytes));
}
template <int T>
static inline void tile_store_block(void* p) {
  asm volatile("tilestored %%tmm%c1, (%2,%3,1)"
               : "=m"(*static_cast<char (*)[1024]>(p))
               : "i"(T), "r"(p), "r"(int64_t{64}));
}
// C[m][n] += sum over pairs of A[m][2k..] * B[k][2n..], bf16 products summed in fp32
template <int C, int A, int B>
static inline void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// C[m][n] += sum over fours of A[m][4k..] * B[k][4n..], signed bytes summed in int32
template <int C, int A, int B>
static inline void tile_dot_int8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace tilerank::TR_RUNG
