// AMX tiles for *_amx.cpp files, to be included inside the amx region (after TR_RUNG is set).
//
// A core has 8 tiles of up to 16 rows of up to 64 bytes. A thread configures the shapes (Tiles), then loads, multiplies
// and stores tiles by their number, which is a template argument because the instructions encode it:
//
//   tile_zero<T>()                        all zeros
//   tile_load<T>(p, stride)               row r from p + r * stride, the stride in bytes
//   tile_load_stream<T>(p, stride)        the same for data that is read once, to keep other data in the caches
//   tile_load_rows_stream<T>(p, stride)   the same for memory that the kernel never writes
//   tile_store<T>(p, stride)              row r to p + r * stride
//   tile_load_block<T>(p), tile_load_block_stream<T>(p), tile_store_block<T>(p)
//                                         the same for a tile of 16 rows of 64 bytes that lie one after the other
//   tile_dot_bf16<C, A, B>()              C[m][n] += sum over k, i < 2 of A[m][2 k + i] * B[k][2 n + i], in fp32
//   tile_dot_int8<C, A, B>()              C[m][n] += sum over k, i < 4 of A[m][4 k + i] * B[k][4 n + i], in int32; the
//                                         bytes of A are signed, those of B are not
//
// The *_block and *_rows forms tell the compiler which memory they access, so that it can keep other values in
// registers: use them in loops that mix tiles and vectors. The other forms are barriers for all memory accesses.
//
// amx_instructions-inl.h implements this with the CPU's instructions, amx_emulated-inl.h in vector code for tests.
#pragma once

namespace tilerank::TR_RUNG {

// The operand of ldtilecfg.
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

}  // namespace tilerank::TR_RUNG

#ifdef TR_EMULATE_AMX
#include "simd/amx_emulated-inl.h"
#else
#include "simd/amx_instructions-inl.h"
#endif
