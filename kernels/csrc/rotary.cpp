// rotary: pairs (i, i + half) of every head, in fp32, rounded once; norm_rotary: of its root-mean-square norm.
#ifndef TR_RUNG
#include "rows.h"
#define TR_SOURCE "rotary.cpp"
#include "foreach_isa.h"
#else
#include "norm.h"

namespace tilerank::TR_RUNG {

// value(lanes, i): what the vector of the head that begins at i is before the rotation.
template <class T, class C, class F>
static void rotate(T* head, const C* cos, const C* sin, int64_t half, const F& value) {
  for_lanes(half, [&](int64_t i, auto lanes) {
    const Vec a = value(lanes, i), b = value(lanes, half + i), c = lanes.load(cos + i), s = lanes.load(sin + i);
    lanes.store(head + i, a * c - b * s);
    lanes.store(head + half + i, b * c + a * s);
  });
}

template <class T>
struct Head {
  T* x;
  int64_t to_next;  // the same head of the next token
  bool of_k;
  int64_t position;

  // The projection's results come from memory; asked for a token ahead, between the work on this one.
  void fetch_next(int64_t d) const {
    for (int64_t i = 0; i < d; i += 64 / static_cast<int64_t>(sizeof(T))) {
      _mm_prefetch(reinterpret_cast<const char*>(x + to_next + i), _MM_HINT_T0);
    }
  }
};

// f(heads, how many) for this thread's heads of q and k, some at a time.
template <class F>
static void for_heads(const Args& args, Team& team, const F& f) {
  const Tensor &q = args.tensor(0), &k = args.tensor(1), &positions = args.tensor(2), &cos = args.tensor(3);
  check_indices("rotary_: positions", positions, cos.size[0]);
  const int64_t q_heads = q.size[1], heads = q_heads + k.size[1];
  for_float(q.dtype, [&](auto type) {
    using T = decltype(type);
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
  });
}

// tensors: q, k, positions, cos, sin
static void rotary(const Args& args, Team& team) {
  const Tensor &cos = args.tensor(3), &sin = args.tensor(4);
  const int64_t d = args.tensor(0).size[2];
  for_heads(args, team, [&]<class T>(const Head<T>* heads, int64_t n) {
    for (const auto* head = heads; head < heads + n; ++head) {
      head->fetch_next(d);
      rotate(head->x, cos.row<T>(head->position), sin.row<T>(head->position), cos.size[1],
             [&](auto lanes, int64_t i) { return lanes.load(head->x + i); });
    }
  });
}
TR_KERNEL(rotary)

// tensors: q, k, positions, cos, sin, weights of q and k; ints: zero_centered; floats: eps
static void norm_rotary(const Args& args, Team& team) {
  const Tensor &cos = args.tensor(3), &sin = args.tensor(4);
  const int64_t d = args.tensor(0).size[2], half = cos.size[1];
  const bool zero_centered = args.integer(0) != 0;
  // As floats, once for all heads: the weights, and the turns of the token at hand.
  float* const wide = static_cast<float*>(team.scratch(sizeof(float) * static_cast<size_t>(2 * d + 2 * half)));
  float* const turns = wide + 2 * d;
  const auto widen_row = [](const auto* from, int64_t count, float* to) {
    for_lanes(count, [&](int64_t at, auto lanes) { lanes.store(to + at, lanes.load(from + at)); });
  };
  for_float(cos.dtype, [&](auto type) {
    for (int i = 0; i < 2; ++i) widen_row(args.tensor(5 + i).template as<decltype(type)>(), d, wide + i * d);
  });
  int64_t position = -1;
  for_heads(args, team, [&]<class T>(const Head<T>* heads, int64_t n) {
    // Together: the roots of one head after the other take longer than all the rest.
    float scales[kLanes] = {};
    for (int64_t i = 0; i < n; ++i) scales[i] = sum_of_squares(heads[i].x, d);
    store(scales, norm_scale(load(scales), d, args.real(0)));
    for (int64_t i = 0; i < n; ++i) {
      const Head<T>& head = heads[i];
      head.fetch_next(d);
      if (head.position != position) {
        position = head.position;
        widen_row(cos.row<T>(position), half, turns);
        widen_row(sin.row<T>(position), half, turns + half);
      }
      const float* const weight = wide + (head.of_k ? d : 0);
      const Vec scale = set(scales[i]);
      const auto normed = [&](auto lanes, int64_t at) {
        return round_to<T>(norm_value<T>(lanes.load(head.x + at), scale, lanes.load(weight + at), zero_centered));
      };
      rotate(head.x, turns, turns + half, half, normed);
      for_lanes(d - 2 * half,
                [&](int64_t at, auto lanes) { lanes.store(head.x + 2 * half + at, normed(lanes, 2 * half + at)); });
    }
  });
}
TR_KERNEL(norm_rotary)

}  // namespace tilerank::TR_RUNG
#endif
