// The running sums of a task's rows (included by attention_amx.cpp after attention_tiles-inl.h; no include guard). Sums
// over a part start from zero, with the shift of the part's first page. They are merged into those over all parts
// before, by the thread that computed these or after all threads are done.

namespace tilerank::TR_RUNG {

class TileSums {
 public:
  // parts: where the sums go if the span does not begin its task.
  TileSums(const Problem& problem, const Span& span, TileScratch& scratch, float* parts)
      : problem_(problem),
        span_(span),
        task_(span.task),
        scratch_(scratch),
        parts_(parts),
        value_dims_(problem.value_dims()),
        lane_groups_((value_dims_ + 15) / 16),
        group_rows_(task_.rows > 16 ? kGroup : task_.rows),
        rows_(task_.rows * span.heads),
        groups_((rows_ + group_rows_ - 1) / group_rows_),
        leads_(span.leads()),
        by_heads_(span.heads == 1 && by_heads(task_)),
        streams_(task_.rows > kGroup && streams(problem.out)),
        all_(span.all()),
        to_store_(all_, by_heads_) {}

  // Merges the sums over a part into those over all parts before it.
  void merge(int64_t part, const Sums& sums) {
    for (int64_t group = 0; group < groups_; ++group) {
      const GroupTokens& seen = scratch_.tokens[group];
      if (seen.end <= part * kPartTokens || seen.begin >= (part + 1) * kPartTokens) continue;
      merge_weights(group, sums.weights + group * group_rows_ * 16, sums.max + group * group_rows_);
      merge_values(group, sums.values + group * group_rows_ * lane_groups_ * 16, 0, lane_groups_);
    }
  }

  void store_rows() { store_rows(rows_); }

 protected:
  // Stores the rows before `end` that are not stored yet.
  void store_rows(int64_t end) {
    for (; stored_ < end; ++stored_, to_store_.next()) {
      const int64_t r = stored_;
      float total = sum(load(scratch_.all_sum + r * 16)), shift = scratch_.all_shift[r], of_values = 1;
      if (problem_.sinks) {
        const float sink = problem_.sinks.as<float>()[to_store_.head()] * kLog2E;
        shift = std::max(shift, sink);
        of_values = first_of(power_of_two(set(scratch_.all_shift[r] - shift)));
        total = total * of_values + first_of(power_of_two(set(sink - shift)));
      }
      if (problem_.lse) *to_store_.element<float>(problem_.lse) = (shift + std::log2(total)) * kLn2;
      const Vec factor = set(of_values / total);
      const float* o = scratch_.all_o + r / group_rows_ * group_rows_ * lane_groups_ * 16 + r % group_rows_ * 16;
      bf16* out = to_store_.element<bf16>(problem_.out);
      // + 0 turns a negative zero into a positive one, whatever was summed.
      if (streams_) {
        for (int64_t i = 0; i < value_dims_; i += 32, o += 2 * group_rows_ * 16) {
          const Vec left = load(o) * factor + zero(), right = load(o + group_rows_ * 16) * factor + zero();
          _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i), narrow(left, right));
        }
        continue;
      }
      for (int64_t i = 0; i < value_dims_; i += 16, o += group_rows_ * 16) {
        const Vec value = load(o) * factor + zero();
        if (value_dims_ - i < 16) {
          store(out + i, value, value_dims_ - i);
        } else {
          store(out + i, value);
        }
      }
    }
  }

  // The span's tokens [begin_of, end_of) of a group, from the beginning of their first page.
  int64_t begin_of(int64_t group) const {
    return std::max(scratch_.tokens[group].begin / kPageTokens * kPageTokens, span_.begin * kPartTokens);
  }
  int64_t end_of(int64_t group) const { return std::min(scratch_.tokens[group].end, span_.end * kPartTokens); }
  int64_t rows_in(int64_t group) const { return std::min(group_rows_, rows_ - group * group_rows_); }

  // Whether a group begins a part with the page at token `begin`.
  bool begins_part(int64_t begin, int64_t group) const { return begin % kPartTokens == 0 || begin == begin_of(group); }
  bool ends_part(const GroupChunk& chunk) const {
    return chunk.end() % kPartTokens == 0 || chunk.end() >= scratch_.tokens[chunk.group].end;
  }
  bool last_of_group(const GroupChunk& chunk) const { return chunk.end() >= end_of(chunk.group); }
  // Whether sums over the part are merged into those over the parts before it.
  bool merges(int64_t part) const { return leads_ && part > span_.begin; }
  Sums left(int64_t part) const { return sums_of_part(parts_, part - span_.begin, task_.rows, lane_groups_ * 16); }

  float* output(const GroupChunk& chunk) const {
    const int64_t part = chunk.part();
    float* const o = !leads_ ? left(part).values : merges(part) ? scratch_.o : scratch_.all_o;
    return o + chunk.group * group_rows_ * lane_groups_ * 16;
  }

  // Copies or merges the softmax weights when the chunk ends its part.
  void finish_weights(const GroupChunk& chunk) {
    if (!ends_part(chunk)) return;
    const int64_t group = chunk.group, first = group * group_rows_, part = chunk.part();
    float *const sum = sums_[group], *const shift = scratch_.shift + first;
    if (merges(part)) {
      merge_weights(group, sum, shift);
    } else {
      const Sums to = leads_ ? Sums{nullptr, scratch_.all_sum, scratch_.all_shift} : left(part);
      std::copy_n(sum, rows_in(group) * 16, to.weights + first * 16);
      std::copy_n(shift, rows_in(group), to.max + first);
    }
  }

  // Whether the chunk completes values that must be merged; call after finish_weights.
  bool merges(const GroupChunk& chunk) const { return merges(chunk.part()) && ends_part(chunk); }

  void merge_weights(int64_t group, const float* sum, const float* shift) {
    const int64_t first = group * group_rows_;
    for (int64_t r = 0; r < rows_in(group); ++r) {
      float& all_shift = scratch_.all_shift[first + r];
      const float new_shift = std::max(all_shift, shift[r]);
      const Vec all_factor = power_of_two(set(all_shift - new_shift)),
                part_factor = power_of_two(set(shift[r] - new_shift));
      merge_sums(scratch_.all_sum + (first + r) * 16, all_factor, sum + r * 16, part_factor);
      scratch_.all_factor[first + r] = first_of(all_factor);
      scratch_.part_factor[first + r] = first_of(part_factor);
      all_shift = new_shift;
    }
  }

  float* all_values(int64_t group) const { return scratch_.all_o + group * group_rows_ * lane_groups_ * 16; }

  void merge_values(int64_t group, const float* from, int64_t first, int64_t count) {
    float* const to = all_values(group);
    const float* const all_factor = scratch_.all_factor + group * group_rows_;
    const float* const part_factor = scratch_.part_factor + group * group_rows_;
    for (int64_t i = first; i < first + count; ++i) {
      for (int64_t r = 0; r < rows_in(group); ++r) {
        const int64_t at = (i * group_rows_ + r) * 16;
        merge_sums(to + at, set(all_factor[r]), from + at, set(part_factor[r]));
      }
    }
  }

  // Whether rows are ordered by head, so that the 16 rows of a tile have the constant stride of tokens and need no
  // packing. With many pages, packing once is cheaper.
  static bool by_heads(const Task& task) {
    return task.rows > kGroup && task.begin() / kSegment == (task.end() - 1) / kSegment && task.rows % kGroup == 0 &&
           task.row % task.heads == 0 && task.rows % (16 * task.heads) == 0;
  }

  // Whether the results exceed the cache and consist of whole cache lines.
  static bool streams(const Tensor& out) {
    constexpr int64_t kStreamBytes = 1 << 20, kLine = 32;
    return out.size[0] * out.size[1] * out.size[2] * 2 >= kStreamBytes && out.size[2] % kLine == 0 &&
           out.stride[0] % kLine == 0 && out.stride[1] % kLine == 0 &&
           reinterpret_cast<uintptr_t>(out.as<bf16>()) % 64 == 0;
  }

  const Problem& problem_;
  const Span& span_;
  const Task& task_;
  TileScratch& scratch_;
  float* const parts_;
  const int64_t value_dims_, lane_groups_;
  const int64_t group_rows_, rows_, groups_;  // a group: up to kGroup rows of a task, or one task per head
  const bool leads_;                          // whether the span has the first part of its task
  const bool by_heads_;
  const bool streams_;  // whether rows are written with non-temporal stores
  const Task all_;
  int64_t stored_ = 0;  // rows stored
  RowWalk to_store_;
  float *sums_[kMostGroups], *spare_sums_;  // sums of a group's weights over a part, 16 lanes each
};

}  // namespace tilerank::TR_RUNG
