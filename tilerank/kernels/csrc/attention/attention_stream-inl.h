// Tasks of few rows, which are bound by reading keys and values (included by attention_amx.cpp after TileTask; no
// include guard).
//
// A page stores the keys of all heads, then their values. The heads of a sequence that belong to one thread are
// processed together, page by page, so that memory is read tile by tile in one long run; separate runs of 8 KiB, the
// pages of one head, are read at half the rate. The softmax of one head overlaps with the products of another head's
// values. As in stream_amx-inl.h, a few lines are prefetched between any two tile instructions, 2 KiB ahead. If a
// thread has only some of the heads, and so short runs, it also prefetches 8 KiB ahead into L2, and touches every 4 KiB
// further ahead; in long runs that would be slower.

// Reads a run of memory tile by tile and prefetches it and the run that follows. Short: one of many short runs.
template <class T, bool Short>
class TileWalk {
 public:
  // `next` has at least `size` elements, or as many as the prefetch distance.
  TileWalk(const T* at, int64_t size, const T* next)
      : at_(bytes(at)),
        end_(bytes(at + size)),
        next_(bytes(next)),
        near_(std::min(kNear, end_ - at_)),
        far_(std::min(kFar, end_ - at_)),
        touch_(std::min(kTouch, end_ - at_)) {}

  const T* at() const { return reinterpret_cast<const T*>(at_); }
  void advance(int64_t size) {
    at_ += size * static_cast<int64_t>(sizeof(T));
    near_at_ = ahead(near_);
    if constexpr (Short) {
      far_at_ = ahead(far_);
      if (reinterpret_cast<uintptr_t>(at_) % 4096 == 0) _mm_prefetch(ahead(touch_), _MM_HINT_T1);
    }
  }
  // Issues one quarter of the prefetches for a tile.
  [[gnu::always_inline]] inline void fetch(int64_t quarter) const {
    constexpr int64_t kQuarter = kTile * static_cast<int64_t>(sizeof(T)) / 4;
    for (int64_t line = 0; line < kQuarter; line += 64) _mm_prefetch(near_at_ + quarter * kQuarter + line, _MM_HINT_T0);
    if constexpr (!Short) return;
    for (int64_t line = 0; line < kQuarter; line += 64) _mm_prefetch(far_at_ + quarter * kQuarter + line, _MM_HINT_T1);
  }

 private:
  static constexpr int64_t kNear = 2048, kFar = 8192, kTouch = 32768;

  static const char* bytes(const T* at) { return reinterpret_cast<const char*>(at); }
  const char* ahead(int64_t distance) const {
    const int64_t left = end_ - at_;
    return distance < left ? at_ + distance : next_ + (distance - left);
  }

  const char *at_, *end_, *next_;
  int64_t near_, far_, touch_;
  const char *near_at_ = ahead(near_), *far_at_ = ahead(far_);
};

class StreamTask : public TileTask {
 public:
  StreamTask(const Problem& problem, const Span& span, TileScratch& scratch, float* parts)
      : TileTask(problem, span, scratch, parts) {}

  void run() {
    if (task_.length == 0) {
      clear_rows<bf16>(problem_, all_);
      return;
    }
    load_rows();
    const Tiles tiles(tile_rows());
    const auto walk_runs = [&](auto row_tiles, auto is_short) {
      problem_.quantized() ? walk<row_tiles, int8_t, is_short>() : walk<row_tiles, bf16, is_short>();
    };
    const auto walk_rows = [&](auto row_tiles) {
      if (span_.heads < problem_.k_pages.size[1]) {
        walk_runs(row_tiles, std::true_type{});
      } else {
        walk_runs(row_tiles, std::false_type{});
      }
    };
    if (task_.rows > 16) {
      walk_rows(std::integral_constant<int, 2>{});
    } else {
      walk_rows(std::integral_constant<int, 1>{});
    }
    if (span_.whole()) store_rows();
  }

 private:
  template <int RowTiles, class T, bool Short>
  void walk() {
    const int64_t end = end_of(0);  // heads that are processed together attend to the same tokens
    GroupChunk chunk;
    chunk.pages = 1;
    for (chunk.begin = begin_of(0); chunk.begin < end; chunk.begin += kPageTokens) {
      chunk.begins = begins_part(chunk.begin, 0);
      const int64_t page = page_of(chunk.begin);
      const T* const keys = problem_.keys<T>(page, task_.kv_head);
      const T* const values = problem_.values<T>(page, task_.kv_head);
      TileWalk<T, Short> walk(keys, span_.heads * key_dims_ * kPageTokens, values);
      for (chunk.group = 0; chunk.group < span_.heads; ++chunk.group) {
        scores<RowTiles>(walk, chunk.group, scores_of(chunk.group));
      }
      const bool last = chunk.begin + kPageTokens >= end;
      const int64_t next_page = last ? page : page_of(chunk.begin + kPageTokens);
      const T* const next =
          last ? problem_.keys_after<T>(task_, span_.heads) : problem_.keys<T>(next_page, task_.kv_head);
      walk = TileWalk<T, Short>(values, span_.heads * lane_groups_ * kTile, next);
      chunk.group = 0;
      softmax(chunk, page);
      for (int64_t head = 0; head < span_.heads; ++head) {
        if (head + 1 < span_.heads) {
          chunk.group = head + 1;
          softmax(chunk, page);
        }
        chunk.group = head;
        if (problem_.quantized()) problem_.fetch_scales(next_page, task_.kv_head + head);
        add_values<RowTiles>(chunk, walk);
        if (merges(chunk)) merge_values(head, output(chunk), 0, lane_groups_);
      }
    }
  }

  int64_t page_of(int64_t token) const { return problem_.page(task_.sequence, task_.first_page + token / kPageTokens); }
  float* scores_of(int64_t head) {
    const int64_t at_once = kGroup / task_.rows;
    return scratch_.s[head / at_once] + head % at_once * task_.rows * 16;
  }
  bf16* probabilities_of(int64_t head) { return scratch_.p + head * group_rows_ * kPageTokens; }

  void softmax(GroupChunk& chunk, int64_t page) {
    if (problem_.quantized()) {
      chunk.key_scales[0] = problem_.key_scales(page, task_.kv_head + chunk.group);
      chunk.value_scales[0] = problem_.value_scales(page, task_.kv_head + chunk.group);
    }
    TileTask::softmax(chunk, 0, scores_of(chunk.group), probabilities_of(chunk.group), [](auto&) {}, [] {});
    finish_weights(chunk);
  }

  // Returns a tile of `rows` rows as an operand: padded to 16 rows with zeros, codes widened.
  const bf16* prepared(const bf16* tile, int64_t rows, int slot) {
    if (rows == 16) return tile;
    std::memset(static_cast<void*>(scratch_.tile[slot]), 0, sizeof(scratch_.tile[slot]));
    std::memcpy(static_cast<void*>(scratch_.tile[slot]), tile, static_cast<size_t>(rows * 64));
    return scratch_.tile[slot];
  }
  const bf16* prepared(const int8_t* tile, int64_t rows, int slot) {
    if (rows < 16) std::memset(static_cast<void*>(scratch_.tile[slot]), 0, sizeof(scratch_.tile[slot]));
    widen_page(tile, rows * 32, scratch_.tile[slot]);
    return scratch_.tile[slot];
  }

  // s = q k^T of one head and page
  template <int RowTiles, class T, bool Short>
  void scores(TileWalk<T, Short>& walk, int64_t head, float* s) {
    const int64_t q_rows = RowTiles == 1 ? task_.rows : 16;
    const bf16* const rows_of_head = scratch_.q + head * steps_ * q_rows * 32;
    const auto lane_group = [&](auto group) {
      const auto step = [&](auto odd, int64_t i, int64_t rows) {
        const bf16* const q = rows_of_head + i * q_rows * 32;
        walk.fetch(0);
        tile_load_stream<6 + odd>(prepared(walk.at(), rows, odd), 64);
        walk.fetch(1);
        tile_load<4>(q, 64);
        if constexpr (RowTiles > 1) tile_load<5>(q + steps_ * kTile, 64);
        walk.fetch(2);
        tile_dot_bf16<group, 4, 6 + odd>();
        if constexpr (RowTiles > 1) tile_dot_bf16<2 + group, 5, 6 + odd>();
        walk.fetch(3);
        walk.advance(rows * 32);
      };
      tile_zero<group>();
      if constexpr (RowTiles > 1) tile_zero<2 + group>();
      int64_t i = 0;
      for (; 32 * i + 64 <= key_dims_; i += 2) {
        step(std::integral_constant<int, 0>{}, i, 16);
        step(std::integral_constant<int, 1>{}, i + 1, 16);
      }
      for (; i < steps_; ++i) step(std::integral_constant<int, 0>{}, i, std::min<int64_t>(16, key_dims_ / 2 - 16 * i));
      tile_store<group>(s + group * 512, 64);
      if constexpr (RowTiles > 1) tile_store<2 + group>(s + group * 512 + 256, 64);
    };
    lane_group(std::integral_constant<int, 0>{});
    lane_group(std::integral_constant<int, 1>{});
  }

  // o += p v of one head and page
  template <int RowTiles, class T, bool Short>
  void add_values(const GroupChunk& chunk, TileWalk<T, Short>& walk) {
    const int64_t first_token = task_.first_token - chunk.begin, n = task_.length - chunk.begin;
    const bool masked = std::is_same_v<T, bf16> && (first_token > 0 || n < kPageTokens);
    const bf16* const p = probabilities_of(chunk.group);
    float* const o = output(chunk);
    tile_load<4>(p, 64);
    if constexpr (RowTiles > 1) tile_load<5>(p + kTile, 64);
    const auto step = [&](auto odd, int64_t i) {
      float* const sums = o + i * group_rows_ * 16;
      walk.fetch(0);
      if constexpr (std::is_same_v<T, bf16>) {
        if (masked) {
          mask_values(walk.at(), first_token, n, 1, scratch_.tile[odd]);
          tile_load_stream<6 + odd>(scratch_.tile[odd], 64);
        } else {
          tile_load_stream<6 + odd>(walk.at(), 64);
        }
      } else {
        tile_load_stream<6 + odd>(prepared(walk.at(), 16, odd), 64);
      }
      walk.fetch(1);
      if (chunk.begins) {
        tile_zero<odd>();
        if constexpr (RowTiles > 1) tile_zero<2 + odd>();
      } else {
        tile_load<odd>(sums, 64);
        if constexpr (RowTiles > 1) tile_load<2 + odd>(sums + 256, 64);
      }
      walk.fetch(2);
      tile_dot_bf16<odd, 4, 6 + odd>();
      if constexpr (RowTiles > 1) tile_dot_bf16<2 + odd, 5, 6 + odd>();
      walk.fetch(3);
      tile_store<odd>(sums, 64);
      if constexpr (RowTiles > 1) tile_store<2 + odd>(sums + 256, 64);
      walk.advance(kTile);
    };
    int64_t i = 0;
    for (; i + 2 <= lane_groups_; i += 2) {
      step(std::integral_constant<int, 0>{}, i);
      step(std::integral_constant<int, 1>{}, i + 1);
    }
    if (i < lane_groups_) step(std::integral_constant<int, 0>{}, i);
  }
};
