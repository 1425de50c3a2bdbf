// The checks of attention and the partition of its work, shared by all rungs.
#pragma once
#include <algorithm>
#include <cstring>
#include <limits>

#include "attention/kv_pages.h"
#include "core/entry.h"

namespace tilerank {

[[noreturn]] inline void attention_error(const char* kernel, const char* what, int64_t expected, const char* of,
                                         int64_t i, int64_t found) {
  throw Error(std::string(kernel) + ": " + what + std::to_string(expected) + of + std::to_string(i) + ", found " +
              std::to_string(found));
}

// Checks everything that could make the kernel access memory outside its arguments, except page numbers, which are
// checked where they are used. kv_starts, visible: or none.
inline void check_batch(const char* kernel, int64_t rows, const Tensor& page_tables, const Tensor& seq_lens,
                        const Tensor& query_starts, const Tensor& kv_starts, bool causal, const Tensor& visible) {
  const int32_t *lengths = seq_lens.as<int32_t>(), *starts = query_starts.as<int32_t>();
  const int64_t sequences = seq_lens.size[0];
  if (starts[0] != 0 || starts[sequences] != rows) {
    throw Error(std::string(kernel) + ": query_starts: expected 0 to " + std::to_string(rows) + ", found " +
                std::to_string(starts[0]) + " to " + std::to_string(starts[sequences]));
  }
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t queries = int64_t{starts[i + 1]} - starts[i];
    if (lengths[i] < 0)
      attention_error(kernel, "seq_lens: expected at least ", 0, " tokens of sequence ", i, lengths[i]);
    if (queries < 0 || (causal && queries > lengths[i])) {
      const int64_t most = causal ? lengths[i] : rows;
      attention_error(kernel, "query_starts: expected 0 to ", most, " queries of sequence ", i, queries);
    }
    const int64_t first = kv_starts ? kv_starts.as<int32_t>()[i] : 0;
    if (first < 0) attention_error(kernel, "kv_starts: expected at least ", 0, " tokens before sequence ", i, first);
    const int64_t pages = lengths[i] > 0 ? (first + lengths[i] + kPageTokens - 1) / kPageTokens : 0;
    if (pages > page_tables.size[1]) {
      attention_error(kernel, "page_tables: expected ", pages, " pages for sequence ", i, page_tables.size[1]);
    }
    for (int64_t row = starts[i], before = 0; visible && row < starts[i + 1]; ++row) {
      const int64_t end = visible.as<int32_t>()[row], least = std::max(lengths[i] - (starts[i + 1] - row) + 1, before);
      if (end < least || end > lengths[i]) {
        throw Error(std::string(kernel) + ": visible: expected " + std::to_string(least) + " to " +
                    std::to_string(lengths[i]) + " for row " + std::to_string(row) + ", found " + std::to_string(end));
      }
      before = end;
    }
  }
}

// No query head may have two KV heads, whose threads would write the same output.
inline void check_kv_map(const Tensor& kv_map, int64_t query_heads) {
  int64_t next = 0;  // after the query heads of the KV heads before
  for (int64_t head = 0; head < kv_map.size[0]; ++head) {
    const int32_t first = kv_map.row<int32_t>(head)[0], count = kv_map.row<int32_t>(head)[1];
    if (count == 0) continue;
    if (first < next || count < 0 || int64_t{first} + count > query_heads) {
      throw Error("attention: kv_map: expected query heads in [" + std::to_string(next) + ", " +
                  std::to_string(query_heads) + ") for KV head " + std::to_string(head) + ", found " +
                  std::to_string(count) + " from " + std::to_string(first));
    }
    next = int64_t{first} + count;
  }
}

// Splits the work, in the order of the batch, into one contiguous part of about equal cost per thread. Neighbouring
// tasks share keys and values, which so stay in one thread's cache.
struct WorkPartition {
  int64_t total;  // cost of all tasks
  int threads;
  int64_t preceding = 0;  // cost of the tasks before the current one

  // Returns the thread that owns a piece of this cost which begins `offset` after the preceding tasks.
  int owner(int64_t offset, int64_t cost) const {
    return static_cast<int>((2 * (preceding + offset) + cost) * threads / (2 * total));
  }
};

// Query heads of padding, which have no KV head, get zeros and a log-sum-exp of -inf.
inline void clear_unserved_heads(const Tensor& out, const Tensor& lse, const Tensor& kv_map, Team& team) {
  const int64_t element = out.dtype == DType::f32 ? 4 : 2;
  const auto [begin, end] = team.share(out.size[0]);
  for (int64_t head = 0; head < out.size[1]; ++head) {
    bool served = false;
    for (int64_t i = 0; i < kv_map.size[0]; ++i) {
      const int32_t* range = kv_map.row<int32_t>(i);
      served = served || (range[0] <= head && head < range[0] + range[1]);
    }
    if (served) continue;
    for (int64_t token = begin; token < end; ++token) {
      std::memset(out.as<char>() + (token * out.stride[0] + head * out.stride[1]) * element, 0,
                  static_cast<size_t>(out.size[2] * element));
      if (lse) lse.row<float>(token)[head * lse.stride[1]] = -std::numeric_limits<float>::infinity();
    }
  }
}

}  // namespace tilerank
