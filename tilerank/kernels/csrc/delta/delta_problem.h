// The arguments of the delta rule, shared by all rungs.
#pragma once
#include "delta/delta_batch.h"

namespace tilerank {

constexpr int64_t kMaxHeadDim = 256;

// T: dtype of the activations.
template <class T>
struct DeltaProblem {
  DeltaProblem(const Tensor& qkv, const Tensor& state, const Tensor& drafts, const Tensor& draft_gates,
               const Tensor& out, int64_t key_heads, const DeltaBatch& batch)
      : qkv(qkv),
        state(state),
        drafts(drafts),
        draft_gates(draft_gates),
        out(out),
        batch(batch),
        key_heads(key_heads),
        value_heads(state.size[1]),
        dk(state.size[2]),
        dv(state.size[3]),
        repeats(key_heads ? value_heads / key_heads : 0) {}

  // A row of q, k and v, and its heads.
  const T* row(int64_t i) const { return qkv.row<T>(i); }
  const T* q(const T* row, int64_t key_head) const { return row + key_head * dk; }
  const T* k(const T* row, int64_t key_head) const { return q(row, key_heads + key_head); }
  const T* v(const T* row, int64_t value_head) const { return q(row, 2 * key_heads) + value_head * dv; }
  const T* q(int64_t row, int64_t key_head) const { return q(this->row(row), key_head); }
  const T* k(int64_t row, int64_t key_head) const { return k(this->row(row), key_head); }
  const T* v(int64_t row, int64_t value_head) const { return v(this->row(row), value_head); }
  T* o(int64_t row, int64_t value_head) const { return out.row<T>(row) + value_head * dv; }
  // The matrix [dk, dv] of a value head of sequence i, which is not padding.
  float* matrix(int64_t i, int64_t value_head) const { return state.row<float>(batch.slots[i]) + value_head * dk * dv; }
  // The row of draft j in the slot of sequence i, and its gates: g of all heads, then beta.
  T* draft(int64_t i, int64_t j) const { return drafts.row<T>(batch.slots[i]) + j * drafts.stride[1]; }
  float* gates_of_draft(int64_t i, int64_t j) const {
    return draft_gates.row<float>(batch.slots[i]) + j * draft_gates.stride[1];
  }

  const Tensor &qkv, &state, &drafts, &draft_gates, &out;
  const DeltaBatch& batch;
  const int64_t key_heads, value_heads, dk, dv;
  const int64_t repeats;  // value heads of a key head
};

}  // namespace tilerank
