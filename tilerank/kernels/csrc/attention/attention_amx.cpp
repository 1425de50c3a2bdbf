// Attention in AMX tiles. With bf16, both products use tiles in prefill and in decode: tiles sum in another order than
// vdpbf16ps, and the bits of a row must not depend on the number of rows.
//
// A task is up to kTaskRows rows of one sequence and KV head. A group of 32 rows (two by two tiles) processes a chunk
// of tokens page by page: scores, then probabilities. The working set in L1 is small: the scores of two pages and the
// probabilities of a chunk. Then the chunk's values are added. All groups process one segment of tokens before the
// next, so that its keys and values are read from memory once and stay in L2. The softmax is interleaved with the
// products (attention_interleaved-inl.h). With few rows (decode), keys and values are read once, as a stream
// (attention_stream-inl.h).
//
// The softmax has no running maximum. Any shift of the exponents is correct as long as nothing overflows, so a row
// keeps the shift of the first page that it attends to until a score exceeds it by kHeadroom. Shifts are integers:
// changing one multiplies by a power of two, which is exact, so the bits of a row do not depend on when it happens.
#ifndef TR_RUNG
#include <optional>
#include <type_traits>
#include <vector>

#include "attention/attention_batch.h"
#include "core/cpu.h"
#define TR_ONLY_AMX
#define TR_SOURCE "attention/attention_amx.cpp"
#include "simd/foreach_isa.h"
#else
#include "simd/amx-inl.h"
#include "attention/attention_task-inl.h"
#include "attention/attention_vector_task-inl.h"
#include "attention/attention_tiles-inl.h"
#include "attention/attention_sums-inl.h"

namespace tilerank::TR_RUNG {

// Copies a page of values with the tokens outside [first_token, n) zeroed: memory beyond the sequence may hold NaN, and
// 0 * NaN is NaN.
static void mask_values(const bf16* page, int64_t first_token, int64_t n, int64_t lane_groups, bf16* copy) {
  const auto keep = [&](int64_t token) { return first_token <= token && token < n; };
  for (int64_t group = 0; group < lane_groups; ++group) {
    for (int64_t pair = 0; pair < kPageTokens / 2; ++pair, page += 32, copy += 32) {
      const __mmask32 kept = (keep(2 * pair) ? 0x55555555u : 0u) | (keep(2 * pair + 1) ? 0xaaaaaaaau : 0u);
      _mm512_store_si512(copy, _mm512_maskz_loadu_epi16(kept, page));
    }
  }
}

// Widens codes, which bf16 represents exactly.
static void widen_page(const int8_t* codes, int64_t n, bf16* to) {
  for (int64_t i = 0; i < n; i += 32) _mm512_store_si512(to + i, narrow(load(codes + i), load(codes + i + 16)));
}

class TileTask : public TileSums {
 public:
  using Scratch = TileScratch;

  TileTask(const Problem& problem, const Span& span, TileScratch& scratch, float* parts)
      : TileSums(problem, span, scratch, parts),
        key_dims_(problem.key_dims()),
        steps_((key_dims_ + 31) / 32),
        in_place_(by_heads_ && key_dims_ % 32 == 0 && problem.scale >= 0) {}

 protected:
  // Tiles of fewer rows take fewer cycles.
  TileConfig tile_rows() const {
    TileConfig config;
    const int rows = static_cast<int>(std::min<int64_t>(task_.rows, 16));
    for (int tile = 0; tile < 8; ++tile) config.set(tile, tile < 6 ? rows : 16, 64);
    return config;
  }

  // Positive, so that -inf stays -inf; q carries the sign of the scale.
  float scale() const { return std::max(std::fabs(problem_.scale) * kLog2E, std::numeric_limits<float>::min()); }
  void look_up(GroupChunk& chunk, int64_t begin, int64_t group) {
    chunk.begin = begin;
    chunk.group = group;
    chunk.begins = begins_part(begin, group);
    const int64_t end = std::min((begin / kTileChunkTokens + 1) * kTileChunkTokens, end_of(group));
    chunk.pages = (end - begin + kPageTokens - 1) / kPageTokens;
    for (int64_t i = 0; i < chunk.pages; ++i) {
      const int64_t first = begin + i * kPageTokens;
      const int64_t page = problem_.page(task_.sequence, task_.first_page + first / kPageTokens);
      chunk.key_scales[i] = chunk.value_scales[i] = nullptr;
      if (problem_.quantized()) {
        widen(chunk, i, page);
        continue;
      }
      chunk.k[i] = problem_.keys<bf16>(page, task_.kv_head);
      chunk.v[i] = problem_.values<bf16>(page, task_.kv_head);
      const int64_t first_token = task_.first_token - first, n = task_.length - first;
      if (first_token > 0 || n < kPageTokens) {
        const int copy = first_token > 0 ? 0 : 1;
        if (!masked_[copy]) mask_values(chunk.v[i], first_token, n, lane_groups_, scratch_.masked[copy]);
        masked_[copy] = true;
        chunk.v[i] = scratch_.masked[copy];
      }
    }
  }

  void widen(GroupChunk& chunk, int64_t i, int64_t page) {
    bf16* const k = scratch_.wide[chunk.buffer * kTileChunkPages + i];
    bf16* const v = k + kMaxDim * kPageTokens;
    widen_page(problem_.keys<int8_t>(page, task_.kv_head), key_dims_ * kPageTokens, k);
    widen_page(problem_.values<int8_t>(page, task_.kv_head), lane_groups_ * 16 * kPageTokens, v);
    chunk.k[i] = k;
    chunk.v[i] = v;
    chunk.key_scales[i] = problem_.key_scales(page, task_.kv_head);
    chunk.value_scales[i] = problem_.value_scales(page, task_.kv_head);
  }

  void look_up_first(GroupChunk& chunk) {
    look_up_from(std::max(task_.begin(), span_.begin * kPartTokens) / kSegment * kSegment, 0, chunk);
  }

  // Advances to the next chunk of the group; then the next group of the segment; then the next segment.
  bool advance(const GroupChunk& chunk, GroupChunk& next) {
    if (chunk.end() % kSegment == 0 || last_of_group(chunk)) {
      return look_up_from(chunk.begin / kSegment * kSegment, chunk.group + 1, next);
    }
    look_up(next, chunk.end(), chunk.group);
    return true;
  }

  // Looks up the first chunk of this group or a later one in the segment, or else in a later segment.
  bool look_up_from(int64_t segment, int64_t group, GroupChunk& chunk) {
    for (; segment < std::min(task_.end(), span_.end * kPartTokens); segment += kSegment, group = 0) {
      for (; group < groups_; ++group) {
        const int64_t begin = std::max(segment, begin_of(group));
        if (begin >= std::min(segment + kSegment, end_of(group))) continue;
        look_up(chunk, begin, group);
        return true;
      }
    }
    return false;
  }

  // Computes the softmax of a page for all rows. interleave(rows) may process some of them between its own
  // instructions. flush() must complete `o` with everything that earlier chunks add to it.
  template <class Interleave, class Flush>
  void softmax(const GroupChunk& chunk, int64_t page, float* s, bf16* p, Interleave&& interleave, Flush&& flush) {
    PageRows of_page = rows_of(chunk, page);
    if (problem_.softcap > 0) cap_scores(chunk, of_page, s);
    const int64_t begin = of_page.begin;
    const GroupTokens& seen = scratch_.tokens[chunk.group];
    const bool whole = seen.latest_begin <= begin && seen.earliest_end >= begin + kPageTokens;
    const bool begins = chunk.begins && page == 0;
    if (begins || seen.latest_begin >= begin) {
      whole ? set_shifts<true>(chunk, of_page, begins, s) : set_shifts<false>(chunk, of_page, begins, s);
    }
    const auto compute = [&](auto is_whole, auto is_quantized) {
      using Rows = RowWork<is_whole, is_quantized>;
      const int64_t first = chunk.group * group_rows_;
      const auto rows_of_page = [&] {
        return Rows{of_page,
                    0,
                    rows_in(chunk.group),
                    s,
                    scratch_.shift + first,
                    begins ? scratch_.zero_sums : sums_[chunk.group],
                    spare_sums_,
                    p + page * kPageScores,
                    _mm512_setzero_ps()};
      };
      Rows rows = rows_of_page();
      interleave(rows);
      rows.finish();
      if (_mm512_cmp_ps_mask(rows.largest, _mm512_set1_ps(kMostOfTwo), _CMP_GT_OQ) != 0) {
        flush();
        move_shifts(chunk, page, of_page, s, p);
        rows = rows_of_page();
        rows.finish();
      }
    };
    const auto with = [&](auto is_whole) {
      problem_.quantized() ? compute(is_whole, std::true_type{}) : compute(is_whole, std::false_type{});
    };
    whole ? with(std::true_type{}) : with(std::false_type{});
    std::swap(sums_[chunk.group], spare_sums_);
  }

  PageRows rows_of(const GroupChunk& chunk, int64_t page) const {
    const int64_t begin = chunk.begin + page * kPageTokens, first = chunk.group * group_rows_;
    PageRows of_page{scratch_.first + first, scratch_.visible + first, begin, {}, {}};
    for (int half = 0; half < 2; ++half) {
      of_page.key_factor[half] = _mm512_set1_ps(scale());
      if (!problem_.quantized()) continue;
      // Scales beyond the sequence may hold anything.
      const __mmask16 ours = lanes(tokens(task_.first_token - begin, task_.length - begin), half);
      const __m512 keys = _mm512_maskz_loadu_ps(ours, chunk.key_scales[page] + 16 * half);
      of_page.key_factor[half] = _mm512_mul_ps(of_page.key_factor[half], keys);
      of_page.value_factor[half] = _mm512_maskz_loadu_ps(ours, chunk.value_scales[page] + 16 * half);
    }
    return of_page;
  }

  // Replaces products of queries and keys by capped scores, whose factor is one.
  void cap_scores(const GroupChunk& chunk, PageRows& of_page, float* s) const {
    const Vec cap = set(problem_.softcap * kLog2E), part = set(1 / (problem_.softcap * kLog2E));
    for (int half = 0; half < 2; ++half) {
      const Vec factor = Vec{of_page.key_factor[half]} * part;
      for (int64_t r = 0; r < rows_in(chunk.group); ++r) {
        float* const of_row = s + (half * kGroup + r) * 16;
        store(of_row, cap * tanh(load(of_row) * factor));
      }
      of_page.key_factor[half] = _mm512_set1_ps(1);
    }
  }

  // Sets the shift of every row of which this is the part's first page to its largest score there, rounded up. begins:
  // whether the group begins the part with this page; rows that begin later then have the shift -inf.
  template <bool Whole>
  void set_shifts(const GroupChunk& chunk, const PageRows& of_page, bool begins, const float* scores) {
    const int64_t rows = rows_in(chunk.group), end = of_page.begin + kPageTokens;
    float* const shifts = scratch_.shift + chunk.group * group_rows_;
    const auto is_first = [&](int64_t r) {
      return of_page.first[r] < end && (begins || of_page.first[r] >= of_page.begin);
    };
    if (begins) std::fill_n(shifts, rows, -std::numeric_limits<float>::infinity());
    int64_t r = 0;
    for (; r + 16 <= rows; r += 16) {
      constexpr int kUp = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC;
      uint32_t firsts = 0;
      for (int64_t i = 0; i < 16; ++i) firsts |= uint32_t{is_first(r + i)} << i;
      _mm512_mask_storeu_ps(shifts + r, static_cast<__mmask16>(firsts),
                            _mm512_roundscale_ps(of_page.largest<Whole>(scores + r * 16, r), kUp));
    }
    for (; r < rows; ++r) {
      if (is_first(r)) shifts[r] = std::ceil(of_page.largest<Whole>(scores + r * 16, r, 0.0f));
    }
  }

  // Raises the shift of every row that has a score more than kHeadroom above it.
  void move_shifts(const GroupChunk& chunk, int64_t page, const PageRows& of_page, const float* scores,
                   bf16* probabilities) {
    const int64_t first = chunk.group * group_rows_, rows = rows_in(chunk.group);
    for (int64_t r = 0; r < rows; ++r) {
      const float* s = scores + r * 16;
      float& shift = scratch_.shift[first + r];
      const float largest = of_page.largest<false>(s, r, shift);
      if (!(largest > kHeadroom)) continue;
      const float old = shift;
      shift += std::ceil(largest);
      const Vec factor = power_of_two(set(old - shift));
      float* sum = sums_[chunk.group] + r * 16;
      store(sum, load(sum) * factor);
      for (int64_t i = 0; i < lane_groups_ && !chunk.begins; ++i) {
        float* o = output(chunk) + (i * group_rows_ + r) * 16;
        store(o, load(o) * factor);
      }
      for (int64_t before = 0; before < page; ++before) {
        bf16* p = probabilities + before * kPageScores + r * kPageTokens;
        for (int64_t i = 0; i < kPageTokens; i += 16) store(p + i, load(p + i) * factor);
      }
    }
  }

  void load_rows() {
    in_place_ ? find_rows() : pack_rows();
    for (int64_t group = 0; group < groups_; ++group) {
      sums_[group] = scratch_.sum + group * group_rows_ * 16;
      find_tokens(group);
    }
    spare_sums_ = scratch_.sum + kTaskRows * 16;
    std::fill_n(scratch_.zero_sums, group_rows_ * 16, 0.0f);
  }

  // Finds the tokens of a group. If they begin after the first part, sums over nothing are what its parts are merged
  // into.
  void find_tokens(int64_t group) {
    const int64_t begin = group * group_rows_, end = begin + rows_in(group);
    GroupTokens seen{scratch_.first[begin], scratch_.first[begin], scratch_.visible[begin], scratch_.visible[begin]};
    for (int64_t r = begin + 1; r < end; ++r) {
      seen.begin = std::min(seen.begin, scratch_.first[r]);
      seen.latest_begin = std::max(seen.latest_begin, scratch_.first[r]);
      seen.earliest_end = std::min(seen.earliest_end, scratch_.visible[r]);
      seen.end = std::max(seen.end, scratch_.visible[r]);
    }
    scratch_.tokens[group] = seen;
    if (!leads_ || seen.begin < (span_.begin + 1) * kPartTokens) return;
    std::fill_n(all_values(group), group_rows_ * lane_groups_ * 16, 0.0f);
    std::fill_n(scratch_.all_sum + begin * 16, (end - begin) * 16, 0.0f);
    std::fill_n(scratch_.all_shift + begin, end - begin, -std::numeric_limits<float>::infinity());
  }

  // Tasks are short, so this takes only a few instructions for 16 rows.
  void find_rows() {
    const int64_t tokens = rows_ / task_.heads;
    for (int64_t i = 0; i < tokens; ++i) {
      scratch_.first[i] = task_.begin_of(task_.token(0) + i);
      scratch_.visible[i] = task_.end_of(task_.token(0) + i);
    }
    for (int64_t head = 0; head < task_.heads; ++head) {
      const bf16* const of_head = task_.element<bf16>(problem_.q, head);
      if (head > 0) {
        std::copy_n(scratch_.first, tokens, scratch_.first + head * tokens);
        std::copy_n(scratch_.visible, tokens, scratch_.visible + head * tokens);
      }
      for (int64_t i = 0; i < tokens; i += 16) {
        rows_at_[(head * tokens + i) / 16] = of_head + i * problem_.q.stride[0];
      }
    }
  }

  void pack_rows() {
    // Rows that pad a tile hold anything: no row of a product depends on another.
    const __m512i sign = _mm512_set1_epi16(problem_.scale < 0 ? -0x8000 : 0);
    const int64_t tile_rows = std::min<int64_t>(group_rows_, 16);
    RowWalk walk(all_, by_heads_);
    for (int64_t r = 0; r < rows_; ++r, walk.next()) {
      scratch_.first[r] = walk.begin();
      scratch_.visible[r] = walk.end();
      bf16* to = scratch_.q + (r / tile_rows * steps_ * tile_rows + r % tile_rows) * 32;
      const bf16* from = walk.element<bf16>(problem_.q);
      for (int64_t i = 0; i < steps_; ++i, to += tile_rows * 32) {
        const int64_t n = std::clamp<int64_t>(key_dims_ - 32 * i, 0, 32);
        const __m512i row = load_words(from + 32 * i, n);
        _mm512_store_si512(to, _mm512_xor_si512(row, sign));
      }
    }
  }

  // Returns 16 rows of a group as the left operand of the scores.
  QueryTile queries(int64_t group, int64_t half) const {
    const int64_t tile = 2 * group + half;
    if (!in_place_) return {scratch_.q + tile * steps_ * kTile, 64, kTile};
    return {rows_at_[tile], problem_.q.stride[0] * 2, 32};
  }

  const int64_t key_dims_, steps_;
  const bool in_place_;  // whether products read the queries in place
  const bf16* rows_at_[kTaskRows / 16];
  bool masked_[2] = {};
};

#include "attention/attention_interleaved-inl.h"
#include "attention/attention_stream-inl.h"

class AnyTask : public InterleavedTask {
 public:
  AnyTask(const Problem& problem, const Span& span, TileScratch& scratch, float* parts)
      : InterleavedTask(problem, span, scratch, parts), stream_(problem, span, scratch, parts) {}
  void run() { task_.rows > kGroup ? InterleavedTask::run() : stream_.run(); }

  // Whether the heads of two spans are processed together.
  static bool can_join(const Span& span, const Span& next) {
    return span.task.rows <= 16 && span.heads < kMostGroups &&
           span.heads < kTaskRows / kGroup * (kGroup / span.task.rows) && span.is_followed_by(next);
  }

 private:
  StreamTask stream_;
};

static void run_attention(const Problem& problem, Team& team) {
  if (problem.q.dtype == DType::f32) {
    attention_by_vectors<float>(problem, team);
    return;
  }
  // Few rows are bound by memory: reading a page costs about as much as the arithmetic of four groups.
  const auto token_cost = [](const Task& task) { return (task.rows + kGroup - 1 + 4 * kGroup) / kGroup; };
  run_spans<AnyTask>(problem, {kTaskRows, kPartTokens}, token_cost, team);
  _mm_sfence();  // for non-temporal stores of rows
}

}  // namespace tilerank::TR_RUNG
#endif
