// rotary_: pairs (i, i + half) of every head, in fp32, rounded once.
#ifndef TR_RUNG
#include "rows.h"
#define TR_SOURCE "rotary.cpp"
#include "foreach_isa.h"
#else
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

// tensors: q, k, positions, cos, sin
static void rotary(const Args& args, Team& team) {
  const Tensor &q = args.tensor(0), &k = args.tensor(1), &positions = args.tensor(2), &cos = args.tensor(3),
               &sin = args.tensor(4);
  check_indices("rotary_: positions", positions, cos.size[0]);
  const int64_t q_heads = q.size[1], heads = q_heads + k.size[1];
  for_float(q.dtype, [&](auto type) {
    using T = decltype(type);
    const auto [first, last] = team.share(q.size[0] * heads);
    for (int64_t item = first; item < last; ++item) {
      const int64_t token = item / heads, head = item % heads;
      const int64_t position = positions.as<int64_t>()[token * positions.stride[0]];
      T* x = head < q_heads ? q.row<T>(token) + head * q.stride[1] : k.row<T>(token) + (head - q_heads) * k.stride[1];
      rotate(x, cos.row<T>(position), sin.row<T>(position), cos.size[1]);
    }
  });
}
TR_KERNEL(rotary)

}  // namespace tilerank::TR_RUNG
#endif
