// Fused MoE with int8 weights in AMX tiles. x is quantised, and so is silu(gate) * up, which is kept in fp32 before.
#ifndef TR_RUNG
#include <array>
#include <type_traits>
#include <utility>

#include "core/cpu.h"
#include "moe/experts.h"
#include "linear/int8.h"
#define TR_ONLY_AMX
#define TR_SOURCE "moe/moe_int8_amx.cpp"
#include "simd/foreach_isa.h"
#else
#include "simd/blocks-inl.h"
#include "moe/experts-inl.h"
#include "linear/gemm_amx-inl.h"
#include "linear/finish_amx-inl.h"
#include "linear/int8_rows-inl.h"
#include "linear/stream_amx-inl.h"
#include "linear/gemm_int8_amx-inl.h"
#include "linear/gemm_int8-inl.h"
#include "linear/int8_stripes-inl.h"
#include "linear/int8_tiles_amx-inl.h"
#include "moe/int8_product_amx-inl.h"

namespace tilerank::TR_RUNG {

// Rows are quantised and multiplied a stripe at a time. memory: QuantisedRows, sums and codes of a stripe.
class TokenInt8TileProduct {
 public:
  using Weight = Int8Weight;
  using Input = bf16;
  using Middle = float;
  using Rounds = float;
  static constexpr int64_t kMemoryBoundRows = 192;

  static size_t bytes(const ExpertsArgs<Weight>& a) { return std::max(bytes(a.hidden), bytes(a.width)); }
  TokenInt8TileProduct(const ExpertsArgs<Weight>&, char* memory) : memory_(memory) {}

  template <int kParts, class Row, class To>
  void multiply(const Weight& w, int64_t k, int64_t rows, Range own, const Row& row, const To& to) const {
    const int64_t k_tiles = blocks(k, kInt8TileK);
    const char* const codes = w.codes.as<const char>();
    const float* const scales = w.scales.as<const float>();
    const Blocking blocking = Blocking::of(blocks(rows, kTileRows), k_tiles);
    QuantisedRow* const quantised = reinterpret_cast<QuantisedRow*>(memory_);
    float* const sums = reinterpret_cast<float*>(quantised + blocking.stripe * kTileRows);
    char* const row_codes = reinterpret_cast<char*>(sums + sums_of(k_tiles, blocking));
    const bool few = rows <= kTileRows;
    for (int64_t first = 0; first < rows; first += blocking.stripe * kTileRows) {
      const int64_t m = std::min(blocking.stripe * kTileRows, rows - first);
      const PackedRows packed{row_codes, blocks(m, kTileRows), k_tiles, few ? k_tiles : blocking.panel};
      FirstBlocks ahead(codes, {own.begin * kParts, own.end * kParts}, k_tiles * kInt8BlockStep);
      for (int64_t i = 0; i < m; ++i) {
        quantised[i] = quantise_into(row(first + i), k, packed, i / kTileRows, i % kTileRows, ahead);
      }
      const To destination = to.from(first);
      const ProductFinish<kParts, To, Int8Scaling> finish{destination, {quantised, scales}};
      if (few) return stream_results<kParts>(packed, m, codes, own, finish);
      const Tiles tiles(panel_tiles(kTileRows));
      multiply_stripe<Int8Dot, kParts>(packed, {0, packed.row_tiles}, codes, own, blocking, m, sums, finish);
    }
  }

 private:
  // The most bytes for rows of k inputs.
  static size_t bytes(int64_t k) {
    const int64_t k_tiles = blocks(k, kInt8TileK);
    const Blocking tall = Blocking::of(int64_t{1} << 30, k_tiles), flat = Blocking::of(1, k_tiles);
    const int64_t stripe = std::max(tall.stripe, flat.stripe);
    const int64_t sums = std::max(sums_of(k_tiles, tall), sums_of(k_tiles, flat));
    return static_cast<size_t>(stripe * kTileRows) * sizeof(QuantisedRow) +
           static_cast<size_t>(sums * 4 + stripe * k_tiles * kTileBytes);
  }
  static int64_t sums_of(int64_t k_tiles, const Blocking& blocking) {
    const PackedRows rows{nullptr, 0, k_tiles, blocking.panel};
    return std::max(band_sums<1>(rows, blocking), band_sums<2>(rows, blocking));
  }

  char* const memory_;
};

TR_MOE(token_int8, Int8Weight, RowExperts<TokenInt8TileProduct>)

TR_MOE(int8, Int8Weight, RowExperts<Int8TileProduct<Int8Form> >)

}  // namespace tilerank::TR_RUNG
#endif
