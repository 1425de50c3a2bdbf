// rotary and rotary_float rotate pairs (i, i + half) or (2 i, 2 i + 1) of every head, in fp32, rounded once;
// norm_rotary rotates pairs (i, i + distance) of the root-mean-square norm of every head.
#ifndef TR_RUNG
#include "core/entry.h"
#include "rows/rows.h"
#define TR_SOURCE "rows/rotary.cpp"
#include "simd/foreach_isa.h"
#else
#include "rows/norm-inl.h"

namespace tilerank::TR_RUNG {

template <class T>
static void widen_row(const T* from, int64_t count, float* to) {
  for_lanes(count, [&](int64_t at, auto lanes) { lanes.store(to + at, lanes.load(from + at)); });
}

template <class T, class L>
static void store_both(T* p, T* q, Two x, L lanes) {
  lanes.store(p, x.a);
  lanes.store(q, x.b);
}
#ifdef TR_BF16
static inline void store_both(bf16* p, bf16* q, Two x, AllLanes) {
  const __m512i both = narrow(x.a, x.b);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_castsi512_si256(both));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm512_extracti64x4_epi64(both, 1));
}
#endif

// The cosines and sines of one token, as floats.
template <class T>
class Rotation {
 public:
  static size_t count(int64_t half) { return static_cast<size_t>(3 * half); }  // floats of memory
  // distance: from the first to the second dimension of a pair
  Rotation(const Tensor& rows, int64_t distance, float* memory)
      : half(rows.size[2]),
        distance(distance),
        rows_(rows),
        c_(memory),
        s_(memory + half),
        minus_s_(memory + 2 * half) {}

  void go_to(int64_t token) {
    if (token == token_) return;
    token_ = token;
    const T* const cos = rows_.row<T>(token);
    widen_row(cos, half, c_);
    widen_row(cos + rows_.stride[1], half, s_);
    for_lanes(half, [&](int64_t i, auto lanes) { lanes.store(minus_s_ + i, zero() - lanes.load(s_ + i)); });
  }
  // values(lanes, i) returns the two vectors to rotate, those of the head that begin at i and distance + i.
  template <class H, class F>
  void rotate(H* head, const F& values) const {
    for_lanes(half, [&](int64_t i, auto lanes) {
      const auto [a, b] = values(lanes, i);
      const Vec c = lanes.load(c_ + i);
      const Two turned = {fma(a, c, b * lanes.load(minus_s_ + i)), fma(b, c, a * lanes.load(s_ + i))};
      store_both(head + i, head + distance + i, turned, lanes);
    });
  }

  const int64_t half, distance;

 private:
  const Tensor& rows_;
  float *const c_, *const s_, *const minus_s_;
  int64_t token_ = -1;
};

template <class T>
struct Head {
  T* x;
  int64_t to_next;  // the same head of the next token
  bool of_k;
  int64_t token;

  // Prefetches the same head of the next token: the results of the projection come from memory.
  void fetch_next(int64_t d) const { fetch_row(x + to_next, d); }
};

// Calls f(heads, number of heads) for this thread's heads of q and k, up to kLanes at a time.
template <class T, class F>
static void for_heads(const Tensor& q, const Tensor& k, Team& team, const F& f) {
  const int64_t q_heads = q.size[1], heads = q_heads + k.size[1];
  Head<T> some[kLanes];
  const auto [first, last] = team.share(q.size[0] * heads);
  for (int64_t item = first; item < last; ++item) {
    const int64_t token = item / heads, head = item % heads;
    const bool of_k = head >= q_heads;
    const Tensor& from = of_k ? k : q;
    T* const x = from.row<T>(token) + (head - (of_k ? q_heads : 0)) * from.stride[1];
    const int64_t n = (item - first) % kLanes;
    some[n] = {x, from.stride[0], of_k, token};
    if (n == kLanes - 1 || item == last - 1) f(some, n + 1);
  }
}

// T: dtype of the heads, R: of the cosines and sines.
template <class T, class R>
static void rotate_heads(const Tensor& q, const Tensor& k, const Tensor& rows, Team& team) {
  const int64_t d = q.size[2], half = rows.size[2];
  Rotation<R> rotation(rows, half, static_cast<float*>(team.scratch(sizeof(float) * Rotation<R>::count(half))));
  for_heads<T>(q, k, team, [&](const Head<T>* heads, int64_t n) {
    for (const auto* head = heads; head < heads + n; ++head) {
      head->fetch_next(d);
      rotation.go_to(head->token);
      rotation.rotate(
          head->x, [&](auto lanes, int64_t i) { return Two{lanes.load(head->x + i), lanes.load(head->x + half + i)}; });
    }
  });
}

static inline Vec swap_neighbours(Vec x) {
#ifdef TR_AVX512
  return {_mm512_permute_ps(x.v, 0b10110001)};
#else
  return {_mm256_permute_ps(x.v, 0b10110001)};
#endif
}

template <class T>
static void rotate_neighbours(const Tensor& q, const Tensor& k, const Tensor& rows, Team& team) {
  const int64_t d = q.size[2], half = rows.size[2];
  // c: the cosine of every dimension's pair; s: its sine, negative for the first of a pair.
  float* const c = static_cast<float*>(team.scratch(sizeof(float) * static_cast<size_t>(6 * half)));
  float *const s = c + 2 * half, *const narrow = s + 2 * half;
  int64_t token = -1;
  for_heads<T>(q, k, team, [&](const Head<T>* heads, int64_t n) {
    for (const auto* head = heads; head < heads + n; ++head) {
      head->fetch_next(d);
      if (head->token != token) {
        token = head->token;
        const T* const cos = rows.row<T>(token);
        widen_row(cos, half, narrow);
        widen_row(cos + rows.stride[1], half, narrow + half);
        for (int64_t i = 0; i < half; ++i) {
          c[2 * i] = c[2 * i + 1] = narrow[i];
          s[2 * i] = -narrow[half + i];
          s[2 * i + 1] = narrow[half + i];
        }
      }
      for_lanes(2 * half, [&](int64_t i, auto lanes) {
        const Vec x = lanes.load(head->x + i);
        lanes.store(head->x + i, fma(x, lanes.load(c + i), swap_neighbours(x) * lanes.load(s + i)));
      });
    }
  });
}

TR_ENTRY(rotary, Team& team, const Tensor& q, const Tensor& k, const Tensor& rows, bool neighbours) {
  for_float(rows.dtype, [&](auto type) {
    if (neighbours) {
      rotate_neighbours<decltype(type)>(q, k, rows, team);
    } else {
      rotate_heads<decltype(type), decltype(type)>(q, k, rows, team);
    }
  });
}

TR_ENTRY(rotary_float, Team& team, const Tensor& q, const Tensor& k, const Tensor& angles) {
  for_float(q.dtype, [&](auto type) { rotate_heads<decltype(type), float>(q, k, angles, team); });
}

TR_ENTRY(norm_rotary, Team& team, const Tensor& q, const Tensor& k, const Tensor& q_weight, const Tensor& k_weight,
         float eps, const Tensor& rows, int64_t distance, bool zero_centered) {
  const int64_t d = q.size[2], half = rows.size[2];
  for_float(rows.dtype, [&](auto type) {
    using T = decltype(type);
    const size_t floats = static_cast<size_t>(2 * d) + Rotation<T>::count(half);
    float* const weights = static_cast<float*>(team.scratch(sizeof(float) * floats));
    widen_row(q_weight.as<T>(), d, weights);
    widen_row(k_weight.as<T>(), d, weights + d);
    Rotation<T> rotation(rows, distance, weights + 2 * d);
    for_heads<T>(q, k, team, [&](const Head<T>* heads, int64_t n) {
      // All roots at once: one after the other, they would take longer than all the rest.
      float scales[kLanes] = {};
      for (int64_t i = 0; i < n; ++i) scales[i] = sum_of_squares(heads[i].x, d);
      store(scales, norm_scale(load(scales), d, eps));
      for (int64_t i = 0; i < n; ++i) {
        const Head<T>& head = heads[i];
        const float* const weight = weights + (head.of_k ? d : 0);
        const Vec scale = set(scales[i]);
        const auto normed = [&](auto lanes, int64_t a, int64_t b) {
          const Two x = {lanes.load(head.x + a), lanes.load(head.x + b)};
          const Two w = {lanes.load(weight + a), lanes.load(weight + b)};
          return round_to<T>(norm_values<T>(x, scale, w, zero_centered));
        };
        head.fetch_next(d);
        rotation.go_to(head.token);
        rotation.rotate(head.x, [&](auto lanes, int64_t at) { return normed(lanes, at, distance + at); });
        const auto keep = [&](int64_t begin, int64_t end) {
          for_lanes(end - begin, [&](int64_t i, auto lanes) {
            lanes.store(head.x + begin + i, normed(lanes, begin + i, begin + i).a);
          });
        };
        keep(half, distance);
        keep(distance + half, d);
      }
    });
  });
}

}  // namespace tilerank::TR_RUNG
#endif
