// The product of experts whose rows are quantised to int8, in vectors, compiled once per rung (no include guard;
// include after experts-inl.h and int8_stripes-inl.h).

namespace tilerank::TR_RUNG {

// Rows are quantised and multiplied a stripe at a time. memory: the totals of a stripe with two blocks, then its codes.
template <class Form>
class Int8Product {
  using Stripe = Int8Stripe<Form>;

 public:
  using Weight = typename Form::Weight;
  using Input = bf16;
  using Middle = float;
  using Rounds = float;
  static constexpr int64_t kMemoryBoundRows = kLanes == 16 ? 24 : 4;

  static size_t bytes(const ExpertsArgs<Weight>& a) {
    const int64_t row_bytes = Stripe::row_bytes(std::max(a.hidden, a.width));
    return Stripe::kWorking + static_cast<size_t>(Stripe::kMostRows * row_bytes);
  }
  Int8Product(const ExpertsArgs<Weight>&, char* memory) : memory_(memory) {}

  template <int kParts, class Row, class To>
  void multiply(const Weight& w, int64_t k, int64_t m, Range own, const Row& row, const To& to) const {
    for (int64_t first = 0; first < m; first += Stripe::kMostRows) {
      const Stripe stripe{memory_ + Stripe::kWorking, std::min(Stripe::kMostRows, m - first), k};
      stripe.put({0, stripe.rows}, [&](int64_t i) { return row(first + i); });
      for (int64_t result = own.begin; result < own.end; ++result) {
        const auto emit = [&](int64_t i, const Vec32& values, const Vec32& up) {
          to.write(first + i, result, values, up);
        };
        stripe.multiply(w, result * kParts, kParts, memory_, emit);
      }
    }
  }

 private:
  char* const memory_;
};

}  // namespace tilerank::TR_RUNG
