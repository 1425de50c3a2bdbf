// Rows of any floating-point dtype, as checkpoints have them, compiled once per rung (no include guard).

namespace tilerank::TR_RUNG {

static inline float as_float(const float* p) { return *p; }
static inline float as_float(const double* p) { return static_cast<float>(*p); }
static inline float as_float(const f16* p) { return _cvtsh_ss(p->bits); }
static inline float as_float(const bf16* p) { return to_float(*p); }

// Calls f(T{}) with the type of the rows' elements.
template <class F>
static void for_source(const char* kernel, DType dtype, const F& f) {
  if (dtype == DType::f32) return f(float{});
  if (dtype == DType::bf16) return f(bf16{});
  if (dtype == DType::f16) return f(f16{});
  if (dtype == DType::f64) return f(double{});
  throw Error(std::string(kernel) + ": expected rows of a floating-point dtype");
}

}  // namespace tilerank::TR_RUNG
