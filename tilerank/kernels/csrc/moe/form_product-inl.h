// The product of experts whose rows are quantised to int8, with weights of one of two forms, compiled once per rung (no
// include guard). Product: that of a form, in vectors or in tiles (int8_product-inl.h, int8_product_amx-inl.h).
// Forms: both of them, and the choice for a weight, such as Int4Forms.

namespace tilerank::TR_RUNG {

template <class Forms, template <class> class Product>
class FormProduct {
  using First = Product<typename Forms::First>;
  using Second = Product<typename Forms::Second>;

 public:
  using Weight = typename Forms::Weight;
  using Input = typename First::Input;
  using Middle = typename First::Middle;
  using Rounds = typename First::Rounds;
  static constexpr int64_t kMemoryBoundRows = First::kMemoryBoundRows;

  static size_t bytes(const ExpertsArgs<Weight>& a) { return std::max(First::bytes(a), Second::bytes(a)); }
  FormProduct(const ExpertsArgs<Weight>& a, char* memory) : args_(a), memory_(memory) {}

  template <int kParts, class Row, class To>
  void multiply(const Weight& w, int64_t k, int64_t rows, Range own, const Row& row, const To& to) const {
    Forms::with(w, [&]<class Form>(Form) {
      Product<Form>(args_, memory_).template multiply<kParts>(w, k, rows, own, row, to);
    });
  }

 private:
  const ExpertsArgs<Weight>& args_;
  char* const memory_;
};

}  // namespace tilerank::TR_RUNG
