// The collectives of the ranks of one host, as kernels: they run on the same threads as the kernels around them and can
// be recorded in a graph. shm_segment.h says how the ranks wait for each other.
//
// Arguments of all: the tensors named at each, then the segment; the integers: own rank within the segment, pauses
// before a wait sleeps, its deadline in milliseconds. They are called by parallel/shm.py; what they compute is defined
// by parallel/group.py: sum_in_rank_order.
#ifndef TR_RUNG

#include "kernel.h"
#include "shm_segment.h"
#define TR_SOURCE "shm_collectives.cpp"
#include "foreach_isa.h"

#else

namespace tilerank::TR_RUNG {

// Above this a sum of three or more ranks is cut in parts, one a rank, so that no rank reads all of all slots.
constexpr int64_t kScatterBytes = 32 << 10;

// Round to nearest even by integer arithmetic, on every rung: vcvtneps2bf16 flushes subnormals, torch, and so the other
// transports, does not.
static inline uint32_t round_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

#ifdef TR_AVX512
static inline void store_exact(bf16* p, Vec x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  const __m512i rounded = _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
#else
static inline void store_exact(bf16* p, Vec x) { store(p, x); }  // rounds by integers
#endif
static inline void store_exact(float* p, Vec x) { store(p, x); }
static inline void store_one(float* p, float x) { *p = x; }
static inline void store_one(bf16* p, float x) { p->bits = static_cast<uint16_t>(round_bf16(x)); }
static inline float load_one(const float* p) { return *p; }
static inline float load_one(const bf16* p) {
  const uint32_t bits = static_cast<uint32_t>(p->bits) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// out[i] = parts[0][i] + parts[1][i] + ..., in fp32, in this order; `out` may be one of the parts.
template <class T>
static void sum_parts(const T* const* parts, int ranks, int64_t n, T* out) {
  constexpr int kUnroll = 4;
  int64_t i = 0;
  for (; i + kUnroll * kLanes <= n; i += kUnroll * kLanes) {
    Vec total[kUnroll];
    for (int u = 0; u < kUnroll; ++u) total[u] = load(parts[0] + i + u * kLanes);
    for (int r = 1; r < ranks; ++r) {
      for (int u = 0; u < kUnroll; ++u) total[u] = total[u] + load(parts[r] + i + u * kLanes);
    }
    for (int u = 0; u < kUnroll; ++u) store_exact(out + i + u * kLanes, total[u]);
  }
  for (; i < n; ++i) {
    float total = load_one(parts[0] + i);
    for (int r = 1; r < ranks; ++r) total += load_one(parts[r] + i);
    store_one(out + i, total);
  }
}

static Range part_of(int64_t n, int index, int count, int64_t unit) {
  const int64_t units = (n + unit - 1) / unit;
  return {std::min(units * index / count * unit, n), std::min(units * (index + 1) / count * unit, n)};
}

// Everyone posts all of it and sums for itself: one step.
template <class T>
static void sum_directly(shm::Lane& lane, T* x, int64_t n) {
  const T* parts[shm::kMaxRanks];
  for (int r = 0; r < lane.ranks(); ++r) parts[r] = reinterpret_cast<T*>(lane.slot(r));
  lane.publish();
  lane.wait_for_all();
  sum_parts(parts, lane.ranks(), n, x);
}

// Everyone sums its own part where it posted it, then all collect the parts: two steps.
template <class T>
static void sum_by_parts(shm::Lane& lane, T* x, int64_t n) {
  const int64_t unit = 64 / static_cast<int64_t>(sizeof(T));
  const T* parts[shm::kMaxRanks];
  const Range mine = part_of(n, lane.rank(), lane.ranks(), unit);
  for (int r = 0; r < lane.ranks(); ++r) parts[r] = reinterpret_cast<T*>(lane.slot(r)) + mine.begin;
  lane.publish();
  lane.wait_for_all();
  sum_parts(parts, lane.ranks(), mine.end - mine.begin, reinterpret_cast<T*>(lane.slot(lane.rank())) + mine.begin);
  lane.publish();
  for (int distance = 0; distance < lane.ranks(); ++distance) {
    const int r = (lane.rank() + distance) % lane.ranks();
    const Range theirs = part_of(n, r, lane.ranks(), unit);
    if (distance > 0) lane.wait_for(r);
    std::memcpy(x + theirs.begin, reinterpret_cast<T*>(lane.slot(r)) + theirs.begin,
                static_cast<size_t>(theirs.end - theirs.begin) * sizeof(T));
  }
}

template <class T>
static void sum_lane(shm::Lane& lane, T* x, int64_t n) {
  const int64_t most = static_cast<int64_t>(lane.slot_bytes() / sizeof(T));
  for (int64_t done = 0; done < n; done += most) {
    const int64_t count = std::min(most, n - done);
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    lane.enter();
    lane.wait_until_free();
    std::memcpy(lane.slot(lane.rank()), x + done, bytes);
    if (lane.ranks() > 2 && static_cast<int64_t>(bytes) >= kScatterBytes) {
      sum_by_parts(lane, x + done, count);
    } else {
      sum_directly(lane, x + done, count);
    }
    lane.leave();
  }
}

// Calls f(lane, part) for this thread's lanes, with the part of n items that is the lane's. Lanes are not threads: a
// rank with fewer threads works several.
template <class F>
static void for_lanes(const Args& args, const Tensor& segment, Team& team, int64_t n, int64_t item, F&& f) {
  const int active = shm::active_lanes(segment, n * item);
  for (int i = team.index; i < active; i += team.count) {
    shm::Lane lane(segment, static_cast<int>(args.integer(0)), i, args.integer(1), args.integer(2));
    f(lane, part_of(n, i, active, 64 / item));
  }
}

// x[n] f32 or bf16, in place.
static void shm_all_reduce(const Args& args, Team& team) {
  const Tensor& x = args.tensor(0);
  for_float(x.dtype, [&](auto kind) {
    using T = decltype(kind);
    for_lanes(args, args.tensor(1), team, x.size[0], sizeof(T),
              [&](shm::Lane& lane, Range part) { sum_lane(lane, x.as<T>() + part.begin, part.end - part.begin); });
  });
}
TR_KERNEL(shm_all_reduce)

// x[n] u8, out[ranks, n] u8. Without bytes it is a barrier: one step all the same.
static void shm_all_gather(const Args& args, Team& team) {
  const Tensor &x = args.tensor(0), &out = args.tensor(1);
  for_lanes(args, args.tensor(2), team, x.size[0], 1, [&](shm::Lane& lane, Range part) {
    int64_t done = part.begin;
    do {
      const auto count = std::min(lane.slot_bytes(), static_cast<size_t>(part.end - done));
      lane.enter();
      lane.wait_until_free();
      if (count > 0) std::memcpy(lane.slot(lane.rank()), x.as<char>() + done, count);
      lane.publish();
      for (int distance = 1; distance <= lane.ranks(); ++distance) {
        const int r = (lane.rank() + distance) % lane.ranks();
        lane.wait_for(r);
        if (count > 0) std::memcpy(out.row<char>(r) + done, lane.slot(r), count);
      }
      lane.leave();
      done += static_cast<int64_t>(count);
    } while (done < part.end);
  });
}
TR_KERNEL(shm_all_gather)

// x[n] u8, in place; a fourth integer is the rank it comes from. That rank runs ahead of the others by at most one.
static void shm_broadcast(const Args& args, Team& team) {
  const Tensor& x = args.tensor(0);
  const int root = static_cast<int>(args.integer(3));
  for_lanes(args, args.tensor(1), team, x.size[0], 1, [&](shm::Lane& lane, Range part) {
    for (int64_t done = part.begin; done < part.end;) {
      const auto count = std::min(lane.slot_bytes(), static_cast<size_t>(part.end - done));
      lane.enter();
      if (lane.rank() == root) {
        lane.wait_until_free();
        std::memcpy(lane.slot(root), x.as<char>() + done, count);
        lane.publish();
      } else {
        lane.publish();
        lane.wait_for(root);
        std::memcpy(x.as<char>() + done, lane.slot(root), count);
      }
      lane.leave();
      done += static_cast<int64_t>(count);
    }
  });
}
TR_KERNEL(shm_broadcast)

}  // namespace tilerank::TR_RUNG

#endif
