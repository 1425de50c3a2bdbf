// The tiles of amx-inl.h in AVX-512, for tests on CPUs without AMX (TILERANK_EMULATE_AMX=1 in setup.py's environment).
//
// Values and bits follow the pseudocode of ldtilecfg, tileloadd, tilestored, tdpbf16ps and tdpbsud in Intel's Software
// Developer's Manual, volume 2. Where an instruction would fault, these functions throw Error.
#pragma once

namespace tilerank::TR_RUNG {

// The tile registers of one thread. No instruction can observe the bytes beyond a tile's configured shape; they are not
// kept zero as in hardware.
struct TileFile {
  bool configured = false;
  TileConfig config;
  alignas(64) unsigned char data[8][16][64] = {};
};
inline thread_local constinit TileFile tile_file;

static inline std::string tile_shape(int tile) {
  return "tile " + std::to_string(tile) + " (" + std::to_string(tile_file.config.rows[tile]) + " rows of " +
         std::to_string(tile_file.config.bytes_per_row[tile]) + " bytes)";
}

static inline void expect_configured(int tile) {
  if (!tile_file.configured) throw Error("AMX emulation: a tile is used outside the scope of Tiles");
  if (tile_file.config.rows[tile] == 0) throw Error("AMX emulation: " + tile_shape(tile) + " is not configured");
}

// A block transfer promises the compiler that 1,024 bytes are accessed.
static inline void expect_block(int tile) {
  expect_configured(tile);
  if (tile_file.config.rows[tile] != 16 || tile_file.config.bytes_per_row[tile] != 64) {
    throw Error("AMX emulation: " + tile_shape(tile) + " is loaded or stored as a block of 16 rows of 64 bytes");
  }
}

static inline void expect_product(int c, int a, int b) {
  for (const int tile : {c, a, b}) expect_configured(tile);
  const auto& rows = tile_file.config.rows;
  const auto& bytes = tile_file.config.bytes_per_row;
  const bool distinct = c != a && c != b && a != b;
  const bool words = bytes[c] % 4 == 0 && bytes[a] % 4 == 0;
  if (!distinct || !words || rows[c] != rows[a] || bytes[a] != 4 * rows[b] || bytes[c] != bytes[b]) {
    throw Error("AMX emulation: a product of shapes that do not fit: C " + tile_shape(c) + ", A " + tile_shape(a) +
                ", B " + tile_shape(b));
  }
}

// Configures the tiles of this thread while in scope.
class Tiles {
 public:
  explicit Tiles(const TileConfig& config) {
    bool valid = config.palette == 1 && config.start_row == 0;
    for (const uint8_t byte : config.reserved) valid &= byte == 0;
    for (int tile = 0; tile < 16; ++tile) {
      const int rows = config.rows[tile], bytes = config.bytes_per_row[tile];
      valid &= tile < 8 ? rows <= 16 && bytes <= 64 && (rows == 0) == (bytes == 0) : rows == 0 && bytes == 0;
    }
    if (!valid) throw Error("AMX emulation: ldtilecfg of a configuration that the hardware refuses");
    tile_file = {true, config, {}};
  }
  ~Tiles() { tile_file.configured = false; }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

template <int T>
static inline void tile_zero() {
  expect_configured(T);
  std::memset(tile_file.data[T], 0, sizeof(tile_file.data[T]));
}

static inline void copy_row(void* to, const void* from, size_t bytes) {
  if (bytes == 64) {
    std::memcpy(to, from, 64);
  } else {
    std::memcpy(to, from, bytes);
  }
}
// Uses memcpy, because the address sanitizer does not check masked moves.
template <int T>
static inline void tile_load(const void* p, int64_t row_stride_bytes) {
  expect_configured(T);
  for (int r = 0; r < tile_file.config.rows[T]; ++r) {
    copy_row(tile_file.data[T][r], static_cast<const char*>(p) + r * row_stride_bytes,
             tile_file.config.bytes_per_row[T]);
  }
}
template <int T>
static inline void tile_load_stream(const void* p, int64_t row_stride_bytes) {
  tile_load<T>(p, row_stride_bytes);
}
template <int T>
static inline void tile_load_rows_stream(const void* p, int64_t row_stride_bytes) {
  tile_load<T>(p, row_stride_bytes);
}
template <int T>
static inline void tile_store(void* p, int64_t row_stride_bytes) {
  expect_configured(T);
  for (int r = 0; r < tile_file.config.rows[T]; ++r) {
    copy_row(static_cast<char*>(p) + r * row_stride_bytes, tile_file.data[T][r], tile_file.config.bytes_per_row[T]);
  }
}
template <int T>
static inline void tile_load_block(const void* p) {
  expect_block(T);
  tile_load<T>(p, 64);
}
template <int T>
static inline void tile_load_block_stream(const void* p) {
  tile_load_block<T>(p);
}
template <int T>
static inline void tile_store_block(void* p) {
  expect_block(T);
  tile_store<T>(p, 64);
}

// The first and the second bf16 of each pair are summed apart in fp32, from zero, in order of k; then C += first +
// second. Not inline: the caller sets the rounding mode, and arithmetic must not move across that.
[[gnu::noinline]] static inline void add_bf16_products(int c, int a, int b) {
  const auto& tiles = tile_file.data;
  const int rows = tile_file.config.rows[c], pairs = tile_file.config.rows[b];
  for (int m = 0; m < rows; ++m) {
    __m512 first = _mm512_setzero_ps(), second = _mm512_setzero_ps();
    for (int k = 0; k < pairs; ++k) {
      int pair;
      std::memcpy(&pair, tiles[a][m] + 4 * k, 4);
      const Two x = widen_words(_mm512_set1_epi32(pair)), y = widen_words(_mm512_load_si512(tiles[b][k]));
      first = _mm512_fmadd_ps(x.a.v, y.a.v, first);
      second = _mm512_fmadd_ps(x.b.v, y.b.v, second);
    }
    float* const sums = reinterpret_cast<float*>(tile_file.data[c][m]);
    _mm512_store_ps(sums, _mm512_add_ps(_mm512_load_ps(sums), _mm512_add_ps(first, second)));
  }
}
// Tile products round to nearest even and treat denormals as zero, in operands and results, whatever MXCSR is set to.
template <int C, int A, int B>
static inline void tile_dot_bf16() {
  expect_product(C, A, B);
  constexpr unsigned kMaskedRoundToNearest = 0x1f80, kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(kMaskedRoundToNearest | kFlushToZero | kDenormalsAreZero);
  add_bf16_products(C, A, B);
  _mm_setcsr(before);
}

template <int C, int A, int B>
static inline void tile_dot_int8() {
  expect_product(C, A, B);
  const auto& tiles = tile_file.data;
  for (int m = 0; m < tile_file.config.rows[C]; ++m) {
    __m512i sums = _mm512_load_si512(tiles[C][m]);
    for (int k = 0; k < tile_file.config.rows[B]; ++k) {
      int four;
      std::memcpy(&four, tiles[A][m] + 4 * k, 4);
      sums = _mm512_dpbusd_epi32(sums, _mm512_load_si512(tiles[B][k]), _mm512_set1_epi32(four));
    }
    _mm512_store_si512(tile_file.data[C][m], sums);
  }
}

}  // namespace tilerank::TR_RUNG
