// Tasks of many rows, which are bound by arithmetic (included by attention_amx.cpp after TileTask; no include guard).
//
// Tile products and vector instructions run in parallel if they are at most a few hundred instructions apart. Therefore
// the rows of a page's softmax are interleaved with the products of the next page's scores and of the previous chunk's
// values: one or a few rows per product. Operands are loaded with a non-temporal hint: L1 is too small for all that a
// page needs, and scores, probabilities and sums would be evicted.
//
// The sums of a block remain in the tiles until the next block begins and are stored one by one between its first
// products. Storing them at the end of their own block would wait for its last product and delay the next block.
//
// The rows of a group are stored a few at a time, during the products of the next group, with non-temporal stores:
// ordinary stores would first read the lines.

// The left operand: packed tile by tile, or rows in place with a stride.
struct Packed {
  static constexpr int64_t kStep = kTile;
  template <int T>
  [[gnu::always_inline]] static inline void load(const bf16* a, int64_t) {
    tile_load_block_stream<T>(a);
  }
};
struct InPlace {
  static constexpr int64_t kStep = 32;
  template <int T>
  [[gnu::always_inline]] static inline void load(const bf16* a, int64_t stride) {
    tile_load_rows_stream<T>(a, stride);
  }
};

// One step of 32 summands for two row tiles and two lane groups, with N rows of softmax before every product.
// begin(tile) is called before the product that adds to the tile.
template <int N, class LeftOperand, class Rows, class Begin>
[[gnu::always_inline]] static inline void interleaved_products(Rows& rows, int64_t stride, const bf16* a,
                                                               const bf16* a2, const bf16* b, const bf16* b2,
                                                               const Begin& begin) {
  tile_load_block_stream<6>(b);
  LeftOperand::template load<4>(a, stride);
  begin(std::integral_constant<int, 0>{});
  rows.template run<N>();
  tile_dot_bf16<0, 4, 6>();
  LeftOperand::template load<5>(a2, stride);
  begin(std::integral_constant<int, 2>{});
  rows.template run<N>();
  tile_dot_bf16<2, 5, 6>();
  tile_load_block_stream<7>(b2);
  begin(std::integral_constant<int, 1>{});
  rows.template run<N>();
  tile_dot_bf16<1, 4, 7>();
  begin(std::integral_constant<int, 3>{});
  rows.template run<N>();
  tile_dot_bf16<3, 5, 7>();
}
constexpr auto accumulate = [](auto) {};

// Checks once whether 4 N rows are left; then the addresses of all of them differ by constants.
template <int N, class LeftOperand, class Rows, class Begin>
[[gnu::always_inline]] static inline void interleaved_step(Rows& rows, int64_t stride, const bf16* a, const bf16* a2,
                                                           const bf16* b, const bf16* b2, const Begin& begin) {
  if (rows.left() >= 4 * N) [[likely]] {
    interleaved_products<N, LeftOperand>(rows, stride, a, a2, b, b2, begin);
  } else {
    interleaved_products<0, LeftOperand>(rows, stride, a, a2, b, b2, begin);
  }
}

// Returns where the sums of a tile of a block are stored.
template <int Tile>
[[gnu::always_inline]] static inline float* sums_at(float* block) {
  return block + (Tile % 2 * 2 + Tile / 2) * 256;
}

// Scores of a page, q k^T, for a multiple of 32 dims. The sums in the tiles are first stored to `last`.
template <int N, class LeftOperand, class Rows>
[[gnu::always_inline]] static inline void interleaved_scores(Rows& rows, const QueryTile& q, const QueryTile& q2,
                                                             const bf16* k, int64_t d, float* last) {
  const int64_t steps = d / 32;
  interleaved_step<N, LeftOperand>(rows, q.row_stride, q.at, q2.at, k, k + d * 16,
                                   [&](auto tile) __attribute__((always_inline)) {
                                     tile_store_block<tile>(sums_at<tile>(last));
                                     tile_zero<tile>();
                                   });
  for (int64_t i = 1; i < steps; ++i) {
    const int64_t at = i * LeftOperand::kStep;
    interleaved_step<N, LeftOperand>(rows, q.row_stride, q.at + at, q2.at + at, k + i * kTile, k + d * 16 + i * kTile,
                                     accumulate);
  }
}

// o + p v for two lane groups, over the pages of a chunk. The sums in the tiles are first stored to `last`.
template <int N, class Rows>
[[gnu::always_inline]] static inline void interleaved_values(Rows& rows, const bf16* p, const GroupChunk& chunk,
                                                             int64_t lane_group, float* o, float* last) {
  const int64_t at = lane_group * 16 * kPageTokens;
  const bf16* v = chunk.v[0] + at;
  if (chunk.begins) {
    interleaved_step<N, Packed>(rows, 64, p, p + kTile, v, v + 16 * kPageTokens,
                                [&](auto tile) __attribute__((always_inline)) {
                                  tile_store_block<tile>(sums_at<tile>(last));
                                  tile_zero<tile>();
                                });
  } else {
    interleaved_step<N, Packed>(rows, 64, p, p + kTile, v, v + 16 * kPageTokens,
                                [&](auto tile) __attribute__((always_inline)) {
                                  tile_store_block<tile>(sums_at<tile>(last));
                                  tile_load_block<tile>(sums_at<tile>(o));
                                });
  }
  for (int64_t page = 1; page < chunk.pages; ++page) {
    const bf16* const a = p + page * kPageScores;
    v = chunk.v[page] + at;
    interleaved_step<N, Packed>(rows, 64, a, a + kTile, v, v + 16 * kPageTokens, accumulate);
  }
}

class InterleavedTask : public TileTask {
 public:
  InterleavedTask(const Problem& problem, const Span& span, TileScratch& scratch, float* parts)
      : TileTask(problem, span, scratch, parts),
        lane_pairs_((lane_groups_ + 1) / 2),
        in_tiles_(scratch.discarded),
        next_task_(span.task),
        next_(next_task_) {
    next_task_.row += task_.rows;
    const bool same_head = next_task_.row < task_.queries * task_.heads;
    if (!same_head && task_.kv_head + 1 < problem.k_pages.size[1]) {
      next_task_.row = 0;
      next_task_.head += task_.heads;
      ++next_task_.kv_head;
    }
    next_task_.rows = std::clamp<int64_t>(task_.queries * task_.heads - next_task_.row, 0, task_.rows);
    next_ = RowWalk(next_task_, by_heads(next_task_));
    if (next_task_.rows == 0 || problem.quantized()) return;
    const auto pages = [](int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; };
    fetched_pages_ = std::max(same_head ? pages(task_.end()) : 0, next_task_.begin() / kPageTokens);
    seen_pages_ = std::min(pages(next_task_.end()), fetched_pages_ + kMostPages);
  }

  void run() {
    if (task_.length == 0) {
      clear_rows<bf16>(problem_, task_);
      return;
    }
    load_rows();
    const Tiles tiles(tile_rows());
    GroupChunk chunks[kChunksInFlight];
    for (int i = 0; i < kChunksInFlight; ++i) chunks[i].buffer = i;
    look_up_first(chunks[0]);
    int64_t steps = 0;
    for (int64_t group = 0; group < groups_; ++group) {
      steps += std::max<int64_t>(end_of(group) - begin_of(group) + kPageTokens - 1, 0) / kPageTokens;
    }
    rows_a_step_ = task_.rows / steps + 1;
    lines_a_step_ = (seen_pages_ - fetched_pages_) * lines_of_page() / steps + 1;
    scores_of(chunks[0], 0, scratch_.s[0]);
    const GroupChunk *last = nullptr, *chunk = &chunks[0];
    for (int64_t i = 0; chunk != nullptr; ++i) {
      GroupChunk* const next = &chunks[(i + 1) % kChunksInFlight];
      const bool more = advance(*chunk, *next);
      set_pending(last, half(i + 1));
      for (int64_t page = 0; page < chunk->pages; ++page) {
        const bool ends = page + 1 == chunk->pages;
        step(*chunk, page, half(i), ends ? (more ? next : nullptr) : chunk, ends ? 0 : page + 1,
             lane_pairs_ * (page + 1) / chunk->pages);
      }
      last = chunk;
      chunk = more ? next : nullptr;
      if (chunk == nullptr) {
        set_pending(last, half(i));
        values_up_to(lane_pairs_);
        finish_pairs(0);
      }
    }
    if (span_.whole()) store_rows();
  }

 private:
  bf16* half(int64_t chunk) { return scratch_.p + chunk % 2 * kTileChunkPages * kPageScores; }
  float* scores_at(int64_t number) { return scratch_.s[number % 2]; }

  // The softmax of a page, the scores of the next page, and the previous chunk's values up to `pairs` pairs of lane
  // groups.
  void step(const GroupChunk& chunk, int64_t page, bf16* p, const GroupChunk* next, int64_t next_page, int64_t pairs) {
    float* const s = scores_at(number_);
    float* const next_s = scores_at(++number_);
    const auto flush = [&] { values_up_to(lane_pairs_); };
    const auto interleave = [&](auto& rows) {
      const int64_t products =
          4 * ((next ? steps_ : 0) + (pairs > pending_pairs_ ? (pairs - pending_pairs_) * pending_->pages : 0));
      if (products * 1 >= kGroup - 4) {
        interleave_rows<1>(rows, next, next_page, next_s, pairs);
      } else if (products * 2 >= kGroup - 4) {
        interleave_rows<2>(rows, next, next_page, next_s, pairs);
      } else {
        interleave_rows<4>(rows, next, next_page, next_s, pairs);
      }
    };
    const int64_t done = pending_pairs_;
    fetch_queries();
    fetch_pages();
    if (pending_merges_) fetch_sums(done, pairs);
    softmax(chunk, page, s, p, interleave, flush);
    finish_pairs(done);
    if (page + 1 == chunk.pages) finish_weights(chunk);
    // The products above have stored the sums that were in the tiles before.
    if (next != nullptr) store_rows(std::min(stored_ + rows_a_step_, finished_));
  }

  template <int N, class Rows>
  void interleave_rows(Rows& all, const GroupChunk* next, int64_t next_page, float* next_s, int64_t pairs) {
    Rows rows = all;  // a local copy, kept in registers
    rows.power.keep();
    if (next != nullptr) {
      if (key_dims_ % 32 == 0) {
        const QueryTile q = queries(next->group, 0), q2 = queries(next->group, 1);
        if (in_place_) {
          interleaved_scores<N, InPlace>(rows, q, q2, next->k[next_page], key_dims_, in_tiles_);
        } else {
          interleaved_scores<N, Packed>(rows, q, q2, next->k[next_page], key_dims_, in_tiles_);
        }
        in_tiles_ = next_s;
      } else {
        scores_of(*next, next_page, next_s);
      }
    }
    for (; pending_pairs_ < pairs; ++pending_pairs_) {
      if (2 * pending_pairs_ + 2 > lane_groups_) {
        store_tiles();
        lane_values<1>(pending_p_, *pending_, 2 * pending_pairs_, pending_o_);
      } else {
        float* const o = pending_o_ + pending_pairs_ * 2 * kGroup * 16;
        interleaved_values<N>(rows, pending_p_, *pending_, 2 * pending_pairs_, o, in_tiles_);
        in_tiles_ = o;
      }
    }
    if (in_tiles_ == next_s) store_tiles();
    all.row = rows.row;
    all.largest = rows.largest;
  }

  // Stores the sums in the tiles, before they are read from memory or the tiles are reused.
  void store_tiles() {
    if (in_tiles_ == scratch_.discarded) return;
    for_sums<2>([&](auto row, auto group) {
      constexpr int tile = row * 2 + group;
      tile_store_block<tile>(sums_at<tile>(in_tiles_));
    });
    in_tiles_ = scratch_.discarded;
  }

  void set_pending(const GroupChunk* chunk, const bf16* p) {
    finished_ = finished_with_pending_;
    if (chunk != nullptr && span_.whole() && last_of_group(*chunk)) {
      finished_with_pending_ = std::min((chunk->group + 1) * kGroup, task_.rows);
    }
    pending_ = chunk;
    pending_pairs_ = chunk == nullptr ? lane_pairs_ : 0;
    pending_p_ = p;
    pending_o_ = chunk == nullptr ? nullptr : output(*chunk);
    pending_merges_ = chunk != nullptr && merges(*chunk);
  }

  // Prefetches some queries of the next task: its rows are too far apart for the hardware prefetcher.
  void fetch_queries() {
    for (int64_t i = 0; i < rows_a_step_ && fetched_ < next_task_.rows; ++i, ++fetched_, next_.next()) {
      const bf16* const row = next_.element<bf16>(problem_.q);
      for (int64_t at = 0; at < key_dims_; at += 32) _mm_prefetch(reinterpret_cast<const char*>(row + at), _MM_HINT_T1);
    }
  }

  // Prefetches some of the pages that only the next task attends to.
  void fetch_pages() {
    for (int64_t left = lines_a_step_; left > 0 && fetched_pages_ < seen_pages_;) {
      const int64_t page = problem_.page(task_.sequence, task_.first_page + fetched_pages_);
      const bool of_keys = fetched_lines_ < key_dims_;
      const bf16* const from = of_keys ? problem_.keys<bf16>(page, next_task_.kv_head)
                                       : problem_.values<bf16>(page, next_task_.kv_head) - key_dims_ * 32;
      const int64_t end = std::min(of_keys ? key_dims_ : lines_of_page(), fetched_lines_ + left);
      left -= end - fetched_lines_;
      for (; fetched_lines_ < end; ++fetched_lines_) {
        _mm_prefetch(reinterpret_cast<const char*>(from + fetched_lines_ * 32), _MM_HINT_T1);
      }
      if (fetched_lines_ < lines_of_page()) continue;
      fetched_lines_ = 0;
      ++fetched_pages_;
    }
  }
  int64_t lines_of_page() const { return key_dims_ + lane_groups_ * 16; }  // keys and values

  // Prefetches the sums that finish_pairs changes: they were last used in the previous part.
  void fetch_sums(int64_t first, int64_t end) const {
    const float* const sums = all_values(pending_->group);
    for (int64_t at = 2 * first * kGroup * 16; at < std::min(2 * end, lane_groups_) * kGroup * 16; at += 16) {
      _mm_prefetch(reinterpret_cast<const char*>(sums + at), _MM_HINT_T0);
    }
  }

  // Merges the previous chunk's lane-group pairs from `first` on into the sums over all parts.
  void finish_pairs(int64_t first) {
    if (pending_merges_ && pending_pairs_ > first) {
      store_tiles();
      const int64_t lane_group = 2 * first;
      merge_values(pending_->group, pending_o_, lane_group, std::min(2 * pending_pairs_, lane_groups_) - lane_group);
    }
  }

  void values_up_to(int64_t pairs) {
    store_tiles();
    for (; pending_pairs_ < pairs; ++pending_pairs_) {
      const int64_t lane_group = 2 * pending_pairs_;
      if (lane_group + 2 > lane_groups_) {
        lane_values<1>(pending_p_, *pending_, lane_group, pending_o_);
      } else {
        lane_values<2>(pending_p_, *pending_, lane_group, pending_o_);
      }
    }
  }

  void scores_of(const GroupChunk& chunk, int64_t page, float* s) {
    store_tiles();
    page_scores(queries(chunk.group, 0), queries(chunk.group, 1), chunk.k[page], key_dims_, s);
  }

  static constexpr int64_t kMostPages = 8;  // pages prefetched for the next task
  const int64_t lane_pairs_;
  float* in_tiles_;                      // where the sums in the tiles belong
  int64_t number_ = 0;                   // number of the page, counted over the task
  const GroupChunk* pending_ = nullptr;  // the previous chunk, whose values are being added
  int64_t pending_pairs_ = 0;            // finished pairs of lane groups
  const bf16* pending_p_ = nullptr;
  float* pending_o_ = nullptr;
  bool pending_merges_ = false;  // whether it ends its part, which is then merged
  Task next_task_;               // the next task of the same head, or the first of the next head
  RowWalk next_;                 // its next row to prefetch
  int64_t fetched_ = 0, rows_a_step_ = 0;
  int64_t fetched_pages_ = 0, seen_pages_ = 0;  // of the next task
  int64_t fetched_lines_ = 0, lines_a_step_ = 0;
  int64_t finished_ = 0, finished_with_pending_ = 0;  // rows with complete sums
};
