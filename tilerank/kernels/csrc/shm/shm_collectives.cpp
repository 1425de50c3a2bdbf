// The collectives of the ranks of one host, as kernels: they run on the same threads as the kernels around them and can
// be recorded in a graph. shm_segment.h describes how the ranks wait for each other.
//
// parallel/shm.py calls them, parallel/group.py defines their results (sum_in_rank_order). The last inputs of all are
// the segment, the rank within it, and how it waits (shm::Member).
#ifndef TR_RUNG
#include <array>

#include "core/entry.h"
#include "shm/shm_segment.h"
#define TR_SOURCE "shm/shm_collectives.cpp"
#include "simd/foreach_isa.h"

#else
#include "simd/blocks-inl.h"
#include "rows/norm-inl.h"

namespace tilerank::TR_RUNG {

// From this size on a sum is divided among the ranks: each rank sums one part of all ranks' data, not all of it.
constexpr int64_t kScatterBytes = 32 << 10;

// out[i] = parts[0][i] + parts[1][i] + ..., in fp32, in this order; `out` may be one of the parts. bf16 is rounded by
// integer arithmetic on every rung: vcvtneps2bf16 flushes subnormals, but torch does not, and so neither do the other
// transports.
template <class T>
static void sum_parts(const T* const* parts, int ranks, int64_t n, T* out) {
  for_two(n, [&](int64_t i, auto two) {
    Two total = two.load(parts[0] + i);
    for (int r = 1; r < ranks; ++r) total = total + two.load(parts[r] + i);
    store_exactly(two, out + i, total);
  });
}

// Copies into a slot, whose lines are in the caches of other cores. A string move claims the lines without reading
// them; vector stores would first fetch each line from the other core.
static inline void post(void* to, const void* from, size_t bytes) {
#ifdef __SANITIZE_THREAD__
  std::memcpy(to, from, bytes);  // the thread sanitizer cannot see into inline assembly
#else
  asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
#endif
}

// Prefetches the start of what another rank posted; the hardware prefetcher continues from there.
static inline void fetch(const void* posted, int64_t bytes) {
  for (int64_t i = 0; i < std::min<int64_t>(bytes, 16 << 10); i += 64) {
    _mm_prefetch(static_cast<const char*>(posted) + i, _MM_HINT_T0);
  }
}

// The part of n items of the rank or lane `index`, in whole units.
static Range part_of(int64_t n, int index, int count, int64_t unit) {
  return Team(nullptr, index, count).share(n, unit);
}

// Calls f(rank) for every other rank, once it has published its part of the step.
template <class F>
static void for_others(shm::Lane& lane, const F& f) {
  for (int distance = 1; distance < lane.ranks(); ++distance) {
    const int rank = (lane.rank() + distance) % lane.ranks();
    lane.wait_for(rank);
    f(rank);
  }
}

// One step: every rank posts all its data and computes the whole sum.
template <class T>
static void sum_directly(shm::Lane& lane, T* x, int64_t n) {
  post(lane.slot(lane.rank()), x, static_cast<size_t>(n) * sizeof(T));
  lane.publish();
  lane.wait_for_all();
  const T* parts[shm::kMaxRanks];
  for (int r = 0; r < lane.ranks(); ++r) {
    parts[r] = r == lane.rank() ? x : lane.slot<T>(r);
    if (r != lane.rank()) fetch(parts[r], n * static_cast<int64_t>(sizeof(T)));
  }
  sum_parts(parts, lane.ranks(), n, x);
}

// Two steps: every rank computes one part of the sum and posts it, then all ranks collect the parts.
template <class T>
static void sum_by_parts(shm::Lane& lane, T* x, int64_t n) {
  const auto part = [&](int rank) { return part_of(n, rank, lane.ranks(), 64 / static_cast<int64_t>(sizeof(T))); };
  const auto bytes = [](Range range) { return static_cast<size_t>(range.end - range.begin) * sizeof(T); };
  const Range mine = part(lane.rank());
  T* const posted = lane.slot<T>(lane.rank());
  post(posted, x, bytes({0, mine.begin}));
  post(posted + mine.end, x + mine.end, bytes({mine.end, n}));
  lane.publish();
  lane.wait_for_all();
  const T* parts[shm::kMaxRanks];
  for (int r = 0; r < lane.ranks(); ++r) parts[r] = (r == lane.rank() ? x : lane.slot<T>(r)) + mine.begin;
  sum_parts(parts, lane.ranks(), mine.end - mine.begin, x + mine.begin);
  post(posted + mine.begin, x + mine.begin, bytes(mine));
  lane.publish();
  for_others(lane, [&](int r) {
    const Range theirs = part(r);
    std::memcpy(x + theirs.begin, lane.slot<T>(r) + theirs.begin, bytes(theirs));
  });
}

template <class T>
static void sum_lane(shm::Lane& lane, T* x, int64_t n) {
  const int64_t most = static_cast<int64_t>(lane.slot_bytes() / sizeof(T));
  for (int64_t done = 0; done < n; done += most) {
    const int64_t count = std::min(most, n - done);
    lane.enter();
    lane.wait_until_free();
    if (count * static_cast<int64_t>(sizeof(T)) >= kScatterBytes) {
      sum_by_parts(lane, x + done, count);
    } else {
      sum_directly(lane, x + done, count);
    }
    lane.leave();
  }
}

// Calls f(lane, part) for the lanes of this thread, with each lane's part of the n items. A rank with fewer threads
// than lanes has several lanes per thread.
template <class F>
static void for_lanes(const shm::Member& member, Team& team, int64_t n, int64_t item, F&& f) {
  const int active = shm::active_lanes(member.segment, n * item);
  for (int i = team.index; i < active; i += team.count) {
    shm::Lane lane(member, i);
    f(lane, part_of(n, i, active, std::max<int64_t>(64 / item, 1)));
  }
}

// x: in place
TR_ENTRY(shm_all_reduce, Team& team, const Tensor& x, const Tensor& segment, int64_t rank, int64_t pauses,
         int64_t timeout_ms) {
  for_float(x.dtype, [&](auto kind) {
    using T = decltype(kind);
    for_lanes({segment, rank, pauses, timeout_ms}, team, x.size[0], sizeof(T),
              [&](shm::Lane& lane, Range part) { sum_lane(lane, x.as<T>() + part.begin, part.end - part.begin); });
  });
}

template <class T>
struct AddNorm {
  T *x, *residual, *out;
  const T *weight, *post_weight, *scale;  // post_weight: null without a norm of the sum; scale: null for 1
  int64_t d, x_stride, out_stride;
  float eps;
  bool zero_centered, whole;

  // residual = (residual + the sum of the rows `parts`, or its norm) * scale; out = the norm of the result.
  void row(const T* const* parts, int ranks, int64_t row) const {
    T *const to = out + row * out_stride, *const sum = residual + row * d;
    sum_parts(parts, ranks, d, to);
    const Vec factor = residual_factor(scale);
    const float squares =
        post_weight ? add_normed_row(to, post_weight, sum, d, eps, zero_centered, factor) : add_row(to, sum, d, factor);
    norm_row(sum, squares, weight, to, d, eps, zero_centered);
  }

  // Returns the row that other ranks collect: the norm, or, if `whole`, the sum, from which they compute the norm.
  T* shared(int64_t row) const { return whole ? residual + row * d : out + row * out_stride; }

  void collect(const T* posted, int64_t row) const {
    T* const to = shared(row);
    std::memcpy(to, posted, static_cast<size_t>(d) * sizeof(T));
    if (whole) norm_row(to, sum_of_squares(to, d), weight, out + row * out_stride, d, eps, zero_centered);
  }
};

// Every rank computes some rows and posts the results, then all ranks collect them. If there are few bytes, every rank
// computes all rows.
template <class T>
static void add_norm_lane(shm::Lane& lane, const AddNorm<T>& op, Range chunk) {
  const int64_t count = chunk.end - chunk.begin, d = op.d;
  const auto bytes = [d](int64_t rows) { return static_cast<size_t>(rows * d) * sizeof(T); };
  const bool scattered = static_cast<int64_t>(bytes(count)) >= kScatterBytes;
  const auto part = [&](int rank) { return scattered ? part_of(count, rank, lane.ranks(), 1) : Range{0, count}; };
  T* const x = op.x + chunk.begin * op.x_stride;
  const Range mine = part(lane.rank());
  lane.enter();
  lane.wait_until_free();
  T* const posted = lane.slot<T>(lane.rank());
  const auto post_rows = [&](int64_t first, int64_t end) {
    if (op.x_stride == d) return post(posted + first * d, x + first * d, bytes(end - first));
    for (int64_t row = first; row < end; ++row) post(posted + row * d, x + row * op.x_stride, bytes(1));
  };
  if (scattered) {
    post_rows(0, mine.begin);
    post_rows(mine.end, count);
  } else {
    post_rows(0, count);
  }
  lane.publish();
  lane.wait_for_all();
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    const T* parts[shm::kMaxRanks];
    for (int r = 0; r < lane.ranks(); ++r) {
      parts[r] = r == lane.rank() ? x + row * op.x_stride : lane.slot<T>(r) + row * d;
    }
    op.row(parts, lane.ranks(), chunk.begin + row);
    if (scattered) post(posted + row * d, op.shared(chunk.begin + row), bytes(1));
  }
  if (scattered) {
    lane.publish();
    for_others(lane, [&](int r) {
      const Range theirs = part(r);
      for (int64_t row = theirs.begin; row < theirs.end; ++row) {
        op.collect(lane.slot<T>(r) + row * d, chunk.begin + row);
      }
    });
  }
  lane.leave();
}

// residual is contiguous; a row fits in a slot. The sum of x over the ranks, or, with post_weight, the norm of the sum,
// is added to residual, which is scaled, and out is the norm of the result, with the bits of shm_all_reduce and
// add_rms_norm. Which rows of residual a rank updates depends only on the shapes; the other rows become stale, unless
// `whole` is set.
TR_ENTRY(shm_add_rms_norm, Team& team, const Tensor& x, const Tensor& residual, const Tensor& weight, float eps,
         const Tensor& post_weight, const Tensor& scale, bool zero_centered, bool whole, const Tensor& segment,
         int64_t rank, int64_t pauses, int64_t timeout_ms, const Tensor& out) {
  for_float(x.dtype, [&](auto kind) {
    using T = decltype(kind);
    const AddNorm<T> op{x.as<T>(),           residual.as<T>(),
                        out.as<T>(),         weight.as<T>(),
                        post_weight.as<T>(), scale.as<T>(),
                        x.size[1],           x.stride[0],
                        out.stride[0],       eps,
                        zero_centered,       whole};
    const auto row_bytes = static_cast<int64_t>(sizeof(T)) * op.d;
    for_lanes({segment, rank, pauses, timeout_ms}, team, x.size[0], row_bytes, [&](shm::Lane& lane, Range rows) {
      const int64_t most = static_cast<int64_t>(lane.slot_bytes()) / row_bytes;
      for (int64_t row = rows.begin; row < rows.end; row += most) {
        add_norm_lane(lane, op, {row, std::min(row + most, rows.end)});
      }
    });
  });
}

// Without elements it is a barrier, and still takes one step.
TR_ENTRY(shm_all_gather, Team& team, const Tensor& x, const Tensor& segment, int64_t rank, int64_t pauses,
         int64_t timeout_ms, const Tensor& out) {
  for_lanes({segment, rank, pauses, timeout_ms}, team, x.size[0], 1, [&](shm::Lane& lane, Range part) {
    int64_t done = part.begin;
    do {
      const auto count = std::min(lane.slot_bytes(), static_cast<size_t>(part.end - done));
      lane.enter();
      lane.wait_until_free();
      post(lane.slot(lane.rank()), x.as<char>() + done, count);
      lane.publish();
      if (count > 0) std::memcpy(out.row<char>(lane.rank()) + done, x.as<char>() + done, count);
      for_others(lane, [&](int r) {
        if (count > 0) std::memcpy(out.row<char>(r) + done, lane.slot(r), count);
      });
      lane.leave();
      done += static_cast<int64_t>(count);
    } while (done < part.end);
  });
}

// Copies the bytes [begin, begin + bytes) of rank r's x to its columns of `out`.
static void place_columns(const Tensor& x, const Tensor& out, const int64_t* starts, int r, const char* from,
                          int64_t begin, int64_t bytes) {
  const int64_t row_bytes = x.size[1] * 4, held = (starts[r + 1] - starts[r]) * 4;
  for (int64_t done = 0; done < bytes;) {
    const int64_t row = (begin + done) / row_bytes, column = (begin + done) % row_bytes;
    const int64_t count = std::min(row_bytes - column, bytes - done);
    if (column < held) {
      char* const to = reinterpret_cast<char*>(out.row<float>(row) + starts[r]) + column;
      std::memcpy(to, from + done, static_cast<size_t>(std::min(count, held - column)));
    }
    done += count;
  }
}

// x is contiguous. Columns starts[r] to starts[r + 1] of out are the first columns of the x of rank r.
TR_ENTRY(shm_gather_columns, Team& team, const Tensor& x, const Tensor& starts, const Tensor& segment, int64_t rank,
         int64_t pauses, int64_t timeout_ms, const Tensor& out) {
  const int64_t* const first = starts.as<int64_t>();
  const int64_t ranks = starts.size[0] - 1;
  for (int64_t r = 0; r < ranks; ++r) {
    const int64_t width = first[r + 1] - first[r];
    if (width < 0 || width > x.size[1] || first[0] != 0 || first[ranks] != out.size[1]) {
      throw Error("gather_columns: starts: expected ascending columns from 0 to " + std::to_string(out.size[1]) +
                  " at most " + std::to_string(x.size[1]) + " apart, found " + std::to_string(first[r]) + " to " +
                  std::to_string(first[r + 1]) + " of rank " + std::to_string(r));
    }
  }
  for_lanes({segment, rank, pauses, timeout_ms}, team, x.size[0] * x.size[1], 4, [&](shm::Lane& lane, Range part) {
    const auto most = static_cast<int64_t>(lane.slot_bytes());
    for (int64_t begin = part.begin * 4; begin < part.end * 4; begin += most) {
      const int64_t count = std::min(most, part.end * 4 - begin);
      const char* const own = x.as<char>() + begin;
      lane.enter();
      lane.wait_until_free();
      post(lane.slot(lane.rank()), own, static_cast<size_t>(count));
      lane.publish();
      place_columns(x, out, first, lane.rank(), own, begin, count);
      for_others(lane, [&](int r) { place_columns(x, out, first, r, lane.slot(r), begin, count); });
      lane.leave();
    }
  });
}

// x: in place. The root is at most one broadcast ahead of the other ranks.
TR_ENTRY(shm_broadcast, Team& team, const Tensor& x, int64_t root, const Tensor& segment, int64_t rank, int64_t pauses,
         int64_t timeout_ms) {
  for_lanes({segment, rank, pauses, timeout_ms}, team, x.size[0], 1, [&](shm::Lane& lane, Range part) {
    for (int64_t done = part.begin; done < part.end;) {
      const auto count = std::min(lane.slot_bytes(), static_cast<size_t>(part.end - done));
      lane.enter();
      if (lane.rank() == root) {
        lane.wait_until_free();
        post(lane.slot(lane.rank()), x.as<char>() + done, count);
        lane.publish();
      } else {
        lane.publish();
        lane.wait_for(static_cast<int>(root));
        std::memcpy(x.as<char>() + done, lane.slot(static_cast<int>(root)), count);
      }
      lane.leave();
      done += static_cast<int64_t>(count);
    }
  });
}

}  // namespace tilerank::TR_RUNG

#endif
