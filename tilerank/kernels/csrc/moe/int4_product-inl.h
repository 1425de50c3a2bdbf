// The product of experts with int4 weights and int8 activations, compiled once per rung (no include guard; include
// after gemm_int4-inl.h). Product: that of a form, in vectors or in tiles (int8_product-inl.h, int8_product_amx-inl.h).

namespace tilerank::TR_RUNG {

template <template <class> class Product>
class Int4Product {
  using Wide = Product<Int4Form<64> >;
  using Narrow = Product<Int4Form<32> >;

 public:
  using Weight = OutputScaledWeight;
  using Input = typename Wide::Input;
  using Middle = typename Wide::Middle;
  using Rounds = typename Wide::Rounds;
  static constexpr int64_t kMemoryBoundRows = Wide::kMemoryBoundRows;

  static size_t bytes(const ExpertsArgs<Weight>& a) { return std::max(Wide::bytes(a), Narrow::bytes(a)); }
  Int4Product(const ExpertsArgs<Weight>& a, char* memory) : args_(a), memory_(memory) {}

  template <int kParts, class Row, class To>
  void multiply(const Weight& w, int64_t k, int64_t rows, Range own, const Row& row, const To& to) const {
    with_int4_form(w, [&]<class Form>(Form) {
      Product<Form>(args_, memory_).template multiply<kParts>(w, k, rows, own, row, to);
    });
  }

 private:
  const ExpertsArgs<Weight>& args_;
  char* const memory_;
};

}  // namespace tilerank::TR_RUNG
