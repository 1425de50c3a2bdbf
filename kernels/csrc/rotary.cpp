// rotary: pairs (i, i + half) of every head, in fp32, rounded once; norm_rotary: of its root-mean-square norm.
#ifndef TR_RUNG
#include "rows.h"
#define TR_SOURCE "rotary.cpp"
#include "foreach_isa.h"
#else
#include "norm.h"

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
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(x.b.v, x.a.v);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_castsi512_si256(both));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm512_extracti64x4_epi64(both, 1));
}
#endif

// The rotations of the token at hand, as floats.
template <class T>
class Turns {
 public:
  static size_t count(int64_t half) { return static_cast<size_t>(3 * half); }  // floats of memory
  Turns(const Tensor& cos, const Tensor& sin, float* memory)
      : half(cos.size[1]), cos_(cos), sin_(sin), c_(memory), s_(memory + half), minus_s_(memory + 2 * half) {}

  void go_to(int64_t position) {
    if (position == position_) return;
    position_ = position;
    widen_row(cos_.row<T>(position), half, c_);
    widen_row(sin_.row<T>(position), half, s_);
    for_lanes(half, [&](int64_t i, auto lanes) { lanes.store(minus_s_ + i, zero() - lanes.load(s_ + i)); });
  }
  // values(lanes, i): what the vectors of the head that begin at i and half + i are before.
  template <class F>
  void rotate(T* head, const F& values) const {
    for_lanes(half, [&](int64_t i, auto lanes) {
      const auto [a, b] = values(lanes, i);
      const Vec c = lanes.load(c_ + i);
      const Two turned = {fma(a, c, b * lanes.load(minus_s_ + i)), fma(b, c, a * lanes.load(s_ + i))};
      store_both(head + i, head + half + i, turned, lanes);
    });
  }

  const int64_t half;

 private:
  const Tensor &cos_, &sin_;
  float *const c_, *const s_, *const minus_s_;
  int64_t position_ = -1;
};

template <class T>
struct Head {
  T* x;
  int64_t to_next;  // the same head of the next token
  bool of_k;
  int64_t position;

  // The projection's results come from memory; asked for a token ahead, between the work on this one.
  void fetch_next(int64_t d) const { fetch_row(x + to_next, d); }
};

// f(heads, how many) for this thread's heads of q and k, some at a time.
template <class T, class F>
static void for_heads(const Args& args, Team& team, const F& f) {
  const Tensor &q = args.tensor(0), &k = args.tensor(1), &positions = args.tensor(2);
  const int64_t q_heads = q.size[1], heads = q_heads + k.size[1];
  Head<T> some[kLanes];
  const auto [first, last] = team.share(q.size[0] * heads);
  for (int64_t item = first; item < last; ++item) {
    const int64_t token = item / heads, head = item % heads;
    const bool of_k = head >= q_heads;
    const Tensor& from = of_k ? k : q;
    T* const x = from.row<T>(token) + (head - (of_k ? q_heads : 0)) * from.stride[1];
    const int64_t n = (item - first) % kLanes;
    some[n] = {x, from.stride[0], of_k, positions.as<int64_t>()[token * positions.stride[0]]};
    if (n == kLanes - 1 || item == last - 1) f(some, n + 1);
  }
}

// tensors: q, k, positions, cos, sin
static void rotary(const Args& args, Team& team) {
  const Tensor &cos = args.tensor(3), &sin = args.tensor(4);
  check_indices("rotary_: positions", args.tensor(2), cos.size[0]);
  const int64_t d = args.tensor(0).size[2], half = cos.size[1];
  for_float(cos.dtype, [&](auto type) {
    using T = decltype(type);
    Turns<T> turns(cos, sin, static_cast<float*>(team.scratch(sizeof(float) * Turns<T>::count(half))));
    for_heads<T>(args, team, [&](const Head<T>* heads, int64_t n) {
      for (const auto* head = heads; head < heads + n; ++head) {
        head->fetch_next(d);
        turns.go_to(head->position);
        turns.rotate(head->x, [&](auto lanes, int64_t i) {
          return Two{lanes.load(head->x + i), lanes.load(head->x + half + i)};
        });
      }
    });
  });
}
TR_KERNEL(rotary)

// tensors: q, k, positions, cos, sin, weights of q and k; ints: zero_centered; floats: eps
static void norm_rotary(const Args& args, Team& team) {
  const Tensor &cos = args.tensor(3), &sin = args.tensor(4);
  check_indices("rotary_: positions", args.tensor(2), cos.size[0]);
  const int64_t d = args.tensor(0).size[2], half = cos.size[1];
  const bool zero_centered = args.integer(0) != 0;
  for_float(cos.dtype, [&](auto type) {
    using T = decltype(type);
    const size_t floats = static_cast<size_t>(2 * d) + Turns<T>::count(half);
    float* const weights = static_cast<float*>(team.scratch(sizeof(float) * floats));
    for (int i = 0; i < 2; ++i) widen_row(args.tensor(5 + i).template as<T>(), d, weights + i * d);
    Turns<T> turns(cos, sin, weights + 2 * d);
    for_heads<T>(args, team, [&](const Head<T>* heads, int64_t n) {
      // Together: the roots of one head after the other take longer than all the rest.
      float scales[kLanes] = {};
      for (int64_t i = 0; i < n; ++i) scales[i] = sum_of_squares(heads[i].x, d);
      store(scales, norm_scale(load(scales), d, args.real(0)));
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
        turns.go_to(head.position);
        turns.rotate(head.x, [&](auto lanes, int64_t at) { return normed(lanes, at, half + at); });
        for_lanes(d - 2 * half, [&](int64_t i, auto lanes) {
          lanes.store(head.x + 2 * half + i, normed(lanes, 2 * half + i, 2 * half + i).a);
        });
      }
    });
  });
}
TR_KERNEL(norm_rotary)

}  // namespace tilerank::TR_RUNG
#endif
