// rotary: pairs (i, i + half) of every head, in fp32, rounded once; norm_rotary: of its root-mean-square norm.
#ifndef TR_RUNG
#include <type_traits>

#include "rows.h"
#define TR_SOURCE "rotary.cpp"
#include "foreach_isa.h"
#else
#include "norm.h"

namespace tilerank::TR_RUNG {

template <class T>
static void rotate(T* head, const T* cos, const T* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    T *first = head + i, *second = head + half + i;
    if (const int64_t n = half - i; n < kLanes) {
      const Vec a = load(first, n), b = load(second, n), c = load(cos + i, n), s = load(sin + i, n);
      store(first, a * c - b * s, n);
      store(second, b * c + a * s, n);
    } else {
      const Vec a = load(first), b = load(second), c = load(cos + i), s = load(sin + i);
      store(first, a * c - b * s);
      store(second, b * c + a * s);
    }
  }
}

// f(the head, is it one of k?, row of the table) for this thread's heads of q and k.
template <class F>
static void for_heads(const Args& args, Team& team, const F& f) {
  const Tensor &q = args.tensor(0), &k = args.tensor(1), &positions = args.tensor(2), &cos = args.tensor(3);
  check_indices("rotary_: positions", positions, cos.size[0]);
  const int64_t q_heads = q.size[1], heads = q_heads + k.size[1];
  for_float(q.dtype, [&](auto type) {
    using T = decltype(type);
    const auto [first, last] = team.share(q.size[0] * heads);
    for (int64_t item = first; item < last; ++item) {
      const int64_t token = item / heads, head = item % heads;
      const int64_t position = positions.as<int64_t>()[token * positions.stride[0]];
      const bool of_k = head >= q_heads;
      const Tensor& from = of_k ? k : q;
      T* const x = from.row<T>(token) + (head - (of_k ? q_heads : 0)) * from.stride[1];
      // The projection's results come from memory; asked for a token ahead.
      for (int64_t i = 0; i < from.size[2]; i += 64 / static_cast<int64_t>(sizeof(T))) {
        _mm_prefetch(reinterpret_cast<const char*>(x + from.stride[0] + i), _MM_HINT_T0);
      }
      f(x, of_k, position);
    }
  });
}

// tensors: q, k, positions, cos, sin
static void rotary(const Args& args, Team& team) {
  const Tensor &cos = args.tensor(3), &sin = args.tensor(4);
  for_heads(args, team, [&](auto* x, bool, int64_t position) {
    using T = std::remove_pointer_t<decltype(x)>;
    rotate(x, cos.row<T>(position), sin.row<T>(position), cos.size[1]);
  });
}
TR_KERNEL(rotary)

// tensors: q, k, positions, cos, sin, weights of q and k; ints: zero_centered; floats: eps
static void norm_rotary(const Args& args, Team& team) {
  const Tensor &cos = args.tensor(3), &sin = args.tensor(4);
  for_heads(args, team, [&](auto* x, bool of_k, int64_t position) {
    using T = std::remove_pointer_t<decltype(x)>;
    const Tensor& weight = args.tensor(of_k ? 6 : 5);
    norm_row(x, weight.as<T>(), x, weight.size[0], args.real(0), args.integer(0) != 0);
    rotate(x, cos.row<T>(position), sin.row<T>(position), cos.size[1]);
  });
}
TR_KERNEL(norm_rotary)

}  // namespace tilerank::TR_RUNG
#endif
