// The log-decay and the learning rate of the delta rule, for the rung that includes this file (no include guard).

namespace tilerank::TR_RUNG {

// log(1 + y) for y in [0, 1], within a few units in the last place: 2 artanh(s), s = y / (2 + y) <= 1 / 3.
static inline Vec log_of_one_plus(Vec y) {
  const Vec s = y / (set(2.0f) + y), s2 = s * s;
  Vec p = set(1.0f / 15);
  for (const float c : {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f}) p = fma(p, s2, set(c));
  return (s + s) * p;
}

// log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)
static inline Vec softplus(Vec x) {
  const Vec minus_size = min(x, zero() - x);
  return max(zero(), x) + log_of_one_plus(exp(minus_size));
}

static inline Vec sigmoid(Vec x) { return set(1.0f) / (set(1.0f) + exp(zero() - x)); }

// Elements of a float32 or bfloat16 vector.
template <class Lanes>
static inline Vec load_either(const Tensor& t, int64_t i, Lanes lanes) {
  return t.dtype == DType::f32 ? lanes.load(t.as<float>() + i) : lanes.load(t.as<bf16>() + i);
}

struct Gates {
  Vec g, beta;
};

// Computes the gates of the heads from `head` on. a, b: the row of a token.
template <class T, class Lanes>
static inline Gates gates(const T* a, const T* b, const Tensor& a_log, const Tensor& dt_bias, int64_t head,
                          Lanes lanes) {
  const Vec rate = softplus(lanes.load(a + head) + load_either(dt_bias, head, lanes));
  return {zero() - exp(load_either(a_log, head, lanes)) * rate, round_to<T>(sigmoid(lanes.load(b + head)))};
}

// Writes the gates of all heads of a token.
template <class T>
static inline void write_gates(const T* a, const T* b, const Tensor& a_log, const Tensor& dt_bias, int64_t heads,
                               float* g, float* beta) {
  for_lanes(heads, [&](int64_t head, auto lanes) {
    const Gates found = gates(a, b, a_log, dt_bias, head, lanes);
    lanes.store(g + head, found.g);
    lanes.store(beta + head, found.beta);
  });
}

}  // namespace tilerank::TR_RUNG
