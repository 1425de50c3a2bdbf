// Tasks of many rows: what limits them is arithmetic (attention_amx.cpp is the only includer, after TileTask; no
// include guard, no own region).
//
// Tile products run beside vector instructions, as long as the one finds the other within some hundred instructions. So
// the rows of a page's softmax lie between the products of the next page's scores and of the last unit's values: a row
// or a few for every product. Operands are loaded with a hint that does not bring them into the first-level cache: it
// is too small for all that a page needs, and what is written there (scores, probabilities, sums) would have to leave.
//
// The sums of a block stay in the tiles until the next block begins, and leave one by one between its first products:
// at the end of a block all of them would wait for its last product, and the next block for them.
//
// A group's rows are stored a few at a time, while the next group's products go on, and past the caches: lines that are
// not there would have to be read before they are written.

// The left operand as it was packed, tile by tile, or as rows that lie apart.
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

// One step of 32 summands for two row tiles and two lane groups, with N rows before every product. begin(tile) comes
// before the product that adds to the tile.
template <int N, class Left, class Rows, class Begin>
[[gnu::always_inline]] static inline void woven_products(Rows& rows, int64_t stride, const bf16* a, const bf16* a2,
                                                         const bf16* b, const bf16* b2, const Begin& begin) {
  tile_load_block_stream<6>(b);
  Left::template load<4>(a, stride);
  begin(std::integral_constant<int, 0>{});
  rows.template run<N>();
  tile_dot_bf16<0, 4, 6>();
  Left::template load<5>(a2, stride);
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
constexpr auto go_on = [](auto) {};

// The same, asking once whether there are as many rows left: their addresses then differ by constants.
template <int N, class Left, class Rows, class Begin>
[[gnu::always_inline]] static inline void woven_step(Rows& rows, int64_t stride, const bf16* a, const bf16* a2,
                                                     const bf16* b, const bf16* b2, const Begin& begin) {
  if (rows.left() >= 4 * N) [[likely]] {
    woven_products<N, Left>(rows, stride, a, a2, b, b2, begin);
  } else {
    woven_products<0, Left>(rows, stride, a, a2, b, b2, begin);
  }
}

// Where the sums of a tile of a block are.
template <int Tile>
[[gnu::always_inline]] static inline float* sums_at(float* block) {
  return block + (Tile % 2 * 2 + Tile / 2) * 256;
}

// The scores of a page of whole steps: q k^T. What is in the tiles goes to `last`.
template <int N, class Left, class Rows>
[[gnu::always_inline]] static inline void woven_scores(Rows& rows, const QueryTile& q, const QueryTile& q2,
                                                       const bf16* k, int64_t d, float* last) {
  const int64_t steps = d / 32;
  woven_step<N, Left>(rows, q.row_stride, q.at, q2.at, k, k + d * 16, [&](auto tile) __attribute__((always_inline)) {
    tile_store_block<tile>(sums_at<tile>(last));
    tile_zero<tile>();
  });
  for (int64_t i = 1; i < steps; ++i) {
    const int64_t at = i * Left::kStep;
    woven_step<N, Left>(rows, q.row_stride, q.at + at, q2.at + at, k + i * kTile, k + d * 16 + i * kTile, go_on);
  }
}

// o + p v for two lane groups over the pages of a unit. What is in the tiles goes to `last`.
template <int N, class Rows>
[[gnu::always_inline]] static inline void woven_values(Rows& rows, const bf16* p, const Unit& unit, int64_t lane_group,
                                                       float* o, float* last) {
  const int64_t at = lane_group * 16 * kBlock;
  const bf16* v = unit.v[0] + at;
  if (unit.begin % kPart == 0) {
    woven_step<N, Packed>(rows, 64, p, p + kTile, v, v + 16 * kBlock, [&](auto tile) __attribute__((always_inline)) {
      tile_store_block<tile>(sums_at<tile>(last));
      tile_zero<tile>();
    });
  } else {
    woven_step<N, Packed>(rows, 64, p, p + kTile, v, v + 16 * kBlock, [&](auto tile) __attribute__((always_inline)) {
      tile_store_block<tile>(sums_at<tile>(last));
      tile_load_block<tile>(sums_at<tile>(o));
    });
  }
  for (int64_t page = 1; page < unit.pages; ++page) {
    const bf16* const a = p + page * kPageScores;
    v = unit.v[page] + at;
    woven_step<N, Packed>(rows, 64, a, a + kTile, v, v + 16 * kBlock, go_on);
  }
}

class WovenTask : public TileTask {
 public:
  WovenTask(const Problem& problem, const Span& span, TileScratch& scratch, float* parts)
      : TileTask(problem, span, scratch, parts),
        lane_pairs_((lane_groups_ + 1) / 2),
        in_tiles_(scratch.nothing),
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
    fetched_pages_ = same_head ? (task_.seen() + kBlock - 1) / kBlock : 0;
    seen_pages_ = std::min((next_task_.seen() + kBlock - 1) / kBlock, fetched_pages_ + kMostPages);
  }

  void run() {
    if (task_.length == 0) {
      clear_rows<bf16>(problem_, task_);
      return;
    }
    load_rows();
    const Tiles tiles(tile_rows());
    Unit units[kUnits];
    for (int i = 0; i < kUnits; ++i) units[i].buffer = i;
    look_up_first(units[0]);
    int64_t steps = 0;
    for (int64_t group = 0; group < groups_; ++group) steps += (end_of(group) + kBlock - 1) / kBlock;
    rows_a_step_ = task_.rows / steps + 1;
    lines_a_step_ = (seen_pages_ - fetched_pages_) * lines_of_page() / steps + 1;
    scores_of(units[0], 0, scratch_.s[0]);
    const Unit *last = nullptr, *unit = &units[0];
    for (int64_t i = 0; unit != nullptr; ++i) {
      Unit* const next = &units[(i + 1) % kUnits];
      const bool more = advance(*unit, *next);
      set_pending(last, half(i + 1));
      for (int64_t page = 0; page < unit->pages; ++page) {
        const bool ends = page + 1 == unit->pages;
        step(*unit, page, half(i), ends ? (more ? next : nullptr) : unit, ends ? 0 : page + 1,
             lane_pairs_ * (page + 1) / unit->pages);
      }
      last = unit;
      unit = more ? next : nullptr;
      if (unit == nullptr) {
        set_pending(last, half(i));
        values_up_to(lane_pairs_);
        close_pairs(0);
      }
    }
    if (span_.whole()) store_rows();
  }

 private:
  bf16* half(int64_t unit) { return scratch_.p + unit % 2 * kUnitPages * kPageScores; }
  float* scores_at(int64_t number) { return scratch_.s[number % 2]; }

  // The softmax of a page, the scores of the next one, and values of the last unit up to some pair of lane groups.
  void step(const Unit& unit, int64_t page, bf16* p, const Unit* next, int64_t next_page, int64_t pairs) {
    const float* const s = scores_at(number_);
    float* const next_s = scores_at(++number_);
    const auto settle = [&] { values_up_to(lane_pairs_); };
    const auto weave = [&](auto& rows) {
      const int64_t products =
          4 * ((next ? steps_ : 0) + (pairs > pending_pairs_ ? (pairs - pending_pairs_) * pending_->pages : 0));
      if (products * 1 >= kGroup - 4) {
        weave_in<1>(rows, next, next_page, next_s, pairs);
      } else if (products * 2 >= kGroup - 4) {
        weave_in<2>(rows, next, next_page, next_s, pairs);
      } else {
        weave_in<4>(rows, next, next_page, next_s, pairs);
      }
    };
    const int64_t done = pending_pairs_;
    fetch_queries();
    fetch_pages();
    if (pending_closes_) fetch_sums(done, pairs);
    softmax(unit, page, s, p, weave, settle);
    close_pairs(done);
    if (page + 1 == unit.pages) close_weights(unit);
    // The products so far have pushed out of the tiles what was in them before.
    if (next != nullptr) store_rows(std::min(stored_ + rows_a_step_, finished_));
  }

  template <int N, class Rows>
  void weave_in(Rows& all, const Unit* next, int64_t next_page, float* next_s, int64_t pairs) {
    Rows rows = all;  // in registers
    rows.power.keep();
    if (next != nullptr) {
      if (key_dims_ % 32 == 0) {
        const QueryTile q = queries(next->group, 0), q2 = queries(next->group, 1);
        if (in_place_) {
          woven_scores<N, InPlace>(rows, q, q2, next->k[next_page], key_dims_, in_tiles_);
        } else {
          woven_scores<N, Packed>(rows, q, q2, next->k[next_page], key_dims_, in_tiles_);
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
        woven_values<N>(rows, pending_p_, *pending_, 2 * pending_pairs_, o, in_tiles_);
        in_tiles_ = o;
      }
    }
    if (in_tiles_ == next_s) store_tiles();
    all.row = rows.row;
    all.largest = rows.largest;
  }

  // What is in the tiles, before anything reads it from memory or has tiles of its own.
  void store_tiles() {
    if (in_tiles_ == scratch_.nothing) return;
    for_sums<2>([&](auto row, auto group) {
      constexpr int tile = row * 2 + group;
      tile_store_block<tile>(sums_at<tile>(in_tiles_));
    });
    in_tiles_ = scratch_.nothing;
  }

  void set_pending(const Unit* unit, const bf16* p) {
    finished_ = finished_with_pending_;
    if (unit != nullptr && span_.whole() && last_of_group(*unit)) {
      finished_with_pending_ = std::min((unit->group + 1) * kGroup, task_.rows);
    }
    pending_ = unit;
    pending_pairs_ = unit == nullptr ? lane_pairs_ : 0;
    pending_p_ = p;
    pending_o_ = unit == nullptr ? nullptr : output(*unit);
    pending_closes_ = unit != nullptr && merges(*unit);
  }

  // Asks for some of the queries of the next task: rows lie too far from each other for the processor to foresee them.
  void fetch_queries() {
    for (int64_t i = 0; i < rows_a_step_ && fetched_ < next_task_.rows; ++i, ++fetched_, next_.next()) {
      const bf16* const row = next_.element<bf16>(problem_.q);
      for (int64_t at = 0; at < d_; at += 32) _mm_prefetch(reinterpret_cast<const char*>(row + at), _MM_HINT_T1);
    }
  }

  // And of the pages that it is the first to see.
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
  int64_t lines_of_page() const { return key_dims_ + lane_groups_ * 16; }  // of keys and values

  // What close_pairs is going to change: nothing has touched it since the part before.
  void fetch_sums(int64_t first, int64_t end) const {
    const float* const sums = all_values(pending_->group);
    for (int64_t at = 2 * first * kGroup * 16; at < std::min(2 * end, lane_groups_) * kGroup * 16; at += 16) {
      _mm_prefetch(reinterpret_cast<const char*>(sums + at), _MM_HINT_T0);
    }
  }

  // What the last unit's pairs from `first` on add to the rows' sums over all parts.
  void close_pairs(int64_t first) {
    if (pending_closes_ && pending_pairs_ > first) {
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

  void scores_of(const Unit& unit, int64_t page, float* s) {
    store_tiles();
    page_scores(queries(unit.group, 0), queries(unit.group, 1), unit.k[page], key_dims_, s);
  }

  static constexpr int64_t kMostPages = 8;  // that are asked for ahead
  const int64_t lane_pairs_;
  float* in_tiles_;                // where the sums in the tiles belong
  int64_t number_ = 0;             // of the page, among all that the task meets
  const Unit* pending_ = nullptr;  // the unit before, whose values are being added up
  int64_t pending_pairs_ = 0;      // pairs of lane groups that are done
  const bf16* pending_p_ = nullptr;
  float* pending_o_ = nullptr;
  bool pending_closes_ = false;  // its part, and merges it
  Task next_task_;               // of the same head, or the first of the next one
  RowWalk next_;                 // its row to be fetched
  int64_t fetched_ = 0, rows_a_step_ = 0;
  int64_t fetched_pages_ = 0, seen_pages_ = 0;  // of the next task
  int64_t fetched_lines_ = 0, lines_a_step_ = 0;
  int64_t finished_ = 0, finished_with_pending_ = 0;  // rows whose sums are complete
};
