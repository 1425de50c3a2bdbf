// Activations beside silu (simd-inl.h), compiled once per rung (no include guard).

namespace tilerank::TR_RUNG {

// x (1 + erf(x / sqrt 2)) / 2. erf is the rational minimax approximation of Eigen and XLA, accurate to a few units in
// the last place of 1; its argument is clamped to [-4, 4].
static inline Vec gelu(Vec x) {
  const Vec y = min(set(4.0f), max(set(-4.0f), x * set(0.70710678118654752f)));
  const Vec y2 = y * y;
  Vec p = set(-2.72614225801306e-10f);
  for (const float c : {2.77068142495902e-08f, -2.10102402082508e-06f, -5.69250639462346e-05f, -7.34990630326855e-04f,
                        -2.95459980854025e-03f, -1.60960333262415e-02f}) {
    p = fma(p, y2, set(c));
  }
  Vec q = set(-1.45660718464996e-05f);
  for (const float c :
       {-2.13374055278905e-04f, -1.68282697438203e-03f, -7.37332916720468e-03f, -1.42647390514189e-02f}) {
    q = fma(q, y2, set(c));
  }
  return set(0.5f) * x * (set(1.0f) + y * p / q);
}

// x (1 + tanh u) / 2 = x / (1 + exp(-2u)) with u = sqrt(2 / pi) (x + 0.044715 x^3)
static inline Vec gelu_tanh(Vec x) {
  const Vec u2 = set(1.5957691216057308f) * x * fma(x * x, set(0.044715f), set(1.0f));
  return x / (set(1.0f) + exp(zero() - u2));
}

}  // namespace tilerank::TR_RUNG
