// The product of experts whose rows are quantised to int8 in steps, in AMX tiles (include after experts-inl.h and
// int8_tiles_amx-inl.h).
#pragma once

namespace tilerank::TR_RUNG {

// Rows are quantised in steps and multiplied a stripe at a time; at most 16 rows in vectors. memory: working memory,
// then the codes of a stripe.
template <class Form>
class Int8TileProduct {
  using Few = Int8Stripe<Form>;
  using Many = Int8Tiles<Form>;

 public:
  using Weight = typename Form::Weight;
  using Input = bf16;
  using Middle = float;
  using Rounds = float;
  static constexpr int64_t kMemoryBoundRows = 96;

  static size_t bytes(const ExpertsArgs<Weight>& a) {
    const int64_t k = std::max(a.hidden, a.width);
    return std::max(Few::kWorking + static_cast<size_t>(kTileRows * Few::row_bytes(k)),
                    Many::kWorking + Many::bytes(kStripeRows, k));
  }
  Int8TileProduct(const ExpertsArgs<Weight>&, char* memory) : memory_(memory) {}

  template <int kParts, class Row, class To>
  void multiply(const Weight& w, int64_t k, int64_t rows, Range own, const Row& row, const To& to) const {
    if (rows <= kTileRows) return multiply_few<kParts>(w, k, rows, own, row, to);
    const Tiles tiles(Many::shapes());
    for (int64_t first = 0; first < rows; first += kStripeRows) {
      const int64_t m = std::min(kStripeRows, rows - first);
      const Many stripe(memory_ + Many::kWorking, m, k);
      for (int64_t i = 0; i < m; ++i) stripe.put(row(first + i), k, i);
      const To destination = to.from(first);
      const ProductFinish<kParts, To, TotalScaling<Form> > finish{destination, {w}};
      stripe.template multiply<kParts>({0, stripe.packed.row_tiles}, m, w, own, memory_, finish);
    }
  }

 private:
  static constexpr int64_t kStripeRows = Many::kStripe * kTileRows;

  template <int kParts, class Row, class To>
  void multiply_few(const Weight& w, int64_t k, int64_t rows, Range own, const Row& row, const To& to) const {
    const Few few{memory_ + Few::kWorking, rows, k};
    few.put({0, rows}, row);
    for (int64_t result = own.begin; result < own.end; ++result) {
      few.multiply(w, result * kParts, kParts, memory_,
                   [&](int64_t i, const Vec32& values, const Vec32& up) { to.write(i, result, values, up); });
    }
  }

  char* const memory_;
};

}  // namespace tilerank::TR_RUNG
