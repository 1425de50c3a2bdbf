// The arguments of the delta rule, shared by all rungs.
#pragma once
#include "delta/delta_batch.h"

namespace tilerank {

constexpr int64_t kMaxHeadDim = 256;

// T: dtype of the activations.
template <class T>
struct DeltaProblem {
  DeltaProblem(const Tensor& qkv, const Tensor& state, const Tensor& out, int64_t key_heads, const DeltaBatch& batch)
      : qkv(qkv),
        state(state),
        out(out),
        batch(batch),
        key_heads(key_heads),
        value_heads(state.size[1]),
        dk(state.size[2]),
        dv(state.size[3]),
        repeats(key_heads ? value_heads / key_heads : 0) {}

  const T* q(int64_t row, int64_t key_head) const { return qkv.row<T>(row) + key_head * dk; }
  const T* k(int64_t row, int64_t key_head) const { return q(row, key_heads + key_head); }
  const T* v(int64_t row, int64_t value_head) const { return q(row, 2 * key_heads) + value_head * dv; }
  T* o(int64_t row, int64_t value_head) const { return out.row<T>(row) + value_head * dv; }
  // The matrix [dk, dv] of a value head of sequence i, which is not padding.
  float* matrix(int64_t i, int64_t value_head) const { return state.row<float>(batch.slots[i]) + value_head * dk * dv; }

  const Tensor &qkv, &state, &out;
  const DeltaBatch& batch;
  const int64_t key_heads, value_heads, dk, dv;
  const int64_t repeats;  // value heads of a key head
};

}  // namespace tilerank
