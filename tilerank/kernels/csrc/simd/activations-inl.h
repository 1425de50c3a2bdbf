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

// tanh x within a few units in the last place, as x P(x^2) / Q(x^2) (the approximation of Eigen); NaN stays NaN.
static inline Vec tanh(Vec x) {
  x = min(set(7.90531111f), max(set(-7.90531111f), x));
  const Vec y = x * x;
  Vec p = set(-2.76076847742355e-16f);
  p = fma(p, y, set(2.00018790482477e-13f));
  p = fma(p, y, set(-8.60467152213735e-11f));
  p = fma(p, y, set(5.12229709037114e-08f));
  p = fma(p, y, set(1.48572235717979e-05f));
  p = fma(p, y, set(6.37261928875436e-04f));
  p = fma(p, y, set(4.89352455891786e-03f));
  Vec q = set(1.19825839466702e-06f);
  q = fma(q, y, set(1.18534705686654e-04f));
  q = fma(q, y, set(2.26843463243900e-03f));
  q = fma(q, y, set(4.89352518554385e-03f));
  return x * p / q;
}

// x (1 + tanh u) / 2 = x / (1 + exp(-2u)) with u = sqrt(2 / pi) (x + 0.044715 x^3)
static inline Vec gelu_tanh(Vec x) {
  const Vec u2 = set(1.5957691216057308f) * x * fma(x * x, set(0.044715f), set(1.0f));
  return x / (set(1.0f) + exp(zero() - u2));
}

}  // namespace tilerank::TR_RUNG
