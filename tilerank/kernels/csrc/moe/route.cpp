// The MoE routers: which experts a token is sent to, and with what weights.
#ifndef TR_RUNG
#include "core/entry.h"
#define TR_SOURCE "moe/route.cpp"
#include "simd/foreach_isa.h"
#else
namespace tilerank::TR_RUNG {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Calls f(i, count) for n values, a vector at a time.
template <class F>
static inline void for_vectors(int64_t n, const F& f) {
  for (int64_t i = 0; i < n; i += kLanes) f(i, std::min<int64_t>(kLanes, n - i));
}

struct Largest {
  int64_t index;
  float value;
};

// Removes and returns the largest value, the first of equals. It is replaced by NaN, which never compares equal; -inf
// would not do, because it is a valid value. The index is valid even if all values are NaN.
static Largest take_largest(float* values, int64_t n) {
  Vec best = set(kMinusInfinity);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) best = max(load(values + i), best);
  float largest = max_of(best);
  for (; i < n; ++i) largest = values[i] > largest ? values[i] : largest;
  int64_t index = 0;
  while (index + 1 < n && values[index] != largest) ++index;
  const Largest taken{index, values[index]};
  values[index] = std::numeric_limits<float>::quiet_NaN();
  return taken;
}

template <class T>
static void softmax(const T* x, float* p, int64_t n) {
  float largest = kMinusInfinity;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, to_float(x[i]));
  Vec sums = zero();
  for_vectors(n, [&](int64_t i, int64_t count) {
    store(p + i, exp(load(x + i, count) - set(largest)), count);
    sums = sums + load(p + i, count);
  });
  const Vec total = set(sum(sums));
  for_vectors(n, [&](int64_t i, int64_t count) { store(p + i, load(p + i, count) / total, count); });
}

// weights * scale / divisor, rounded to T
template <class T>
static void finish_weights(float* weights, int64_t n, float divisor, float scale) {
  for_vectors(n, [&](int64_t i, int64_t count) {
    store(weights + i, round_to<T>(load(weights + i, count) / set(divisor) * set(scale)), count);
  });
}

// scales: factors of the weights of each expert, or none
TR_ENTRY(softmax_top_k, Team& team, const Tensor& logits, bool renormalize, const Tensor& scales, const Tensor& ids,
         const Tensor& weights) {
  const int64_t experts = logits.size[1], top = ids.size[1];
  float* const p = static_cast<float*>(team.scratch(experts * sizeof(float)));
  const Range rows = team.share(logits.size[0]);
  for_float(logits.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      softmax(logits.row<const T>(row), p, experts);
      float* const weight = weights.row<float>(row);
      float total = 0;
      for (int64_t choice = 0; choice < top; ++choice) {
        const Largest taken = take_largest(p, experts);
        ids.row<int32_t>(row)[choice] = static_cast<int32_t>(taken.index);
        weight[choice] = taken.value;
        total += taken.value;
      }
      finish_weights<T>(weight, top, renormalize ? total : 1.0f, 1.0f);
      for (int64_t choice = 0; scales && choice < top; ++choice) {
        weight[choice] *= scales.as<const float>()[ids.row<int32_t>(row)[choice]];
      }
    }
  });
}

TR_ENTRY(sigmoid_top_k, Team& team, const Tensor& logits, const Tensor& bias, int64_t groups, int64_t top_groups,
         bool renormalize, float scale, const Tensor& ids, const Tensor& weights) {
  const int64_t experts = logits.size[1], top = ids.size[1], group_size = experts / groups;
  float* const scores = static_cast<float*>(team.scratch((3 * experts + groups) * sizeof(float)));
  float *const choice_scores = scores + experts, *const masked = choice_scores + experts;
  float* const group_scores = masked + experts;
  const Range rows = team.share(logits.size[0]);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const float* const x = logits.row<const float>(row);
    for_vectors(experts, [&](int64_t i, int64_t count) {
      const Vec score = set(1.0f) / (set(1.0f) + exp(zero() - load(x + i, count)));
      store(scores + i, score, count);
      store(choice_scores + i, score + load(bias.as<const float>() + i, count), count);
      store(masked + i, set(kMinusInfinity), count);
    });
    for (int64_t group = 0; group < groups; ++group) {
      float* const members = masked + group * group_size;  // reuses memory that is still unused
      std::copy_n(choice_scores + group * group_size, group_size, members);
      const float first = take_largest(members, group_size).value;
      group_scores[group] = first + take_largest(members, group_size).value;
      std::fill_n(members, group_size, kMinusInfinity);
    }
    for (int64_t i = 0; i < top_groups; ++i) {
      const int64_t first = take_largest(group_scores, groups).index * group_size;
      std::copy_n(choice_scores + first, group_size, masked + first);
    }
    float* const weight = weights.row<float>(row);
    float total = 0;
    for (int64_t choice = 0; choice < top; ++choice) {
      const int64_t expert = take_largest(masked, experts).index;
      ids.row<int32_t>(row)[choice] = static_cast<int32_t>(expert);
      weight[choice] = scores[expert];
      total += scores[expert];
    }
    finish_weights<float>(weight, top, renormalize ? total + 1e-20f : 1.0f, scale);
  }
}

}  // namespace tilerank::TR_RUNG
#endif
