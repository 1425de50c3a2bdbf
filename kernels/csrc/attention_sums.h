// What the rows of a task have summed up so far (attention_amx.cpp is the only includer, after attention_tiles.h: no
// include guard, no own region). Sums over a part start from nothing, at the shift of its first page, and are merged
// with those over all parts before it: by the thread that went through these, or after the others are done.

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
        d_(problem.dims()),
        lane_groups_((d_ + 15) / 16),
        group_rows_(task_.rows > 16 ? kGroup : task_.rows),
        rows_(task_.rows * span.heads),
        groups_((rows_ + group_rows_ - 1) / group_rows_),
        by_heads_(span.heads == 1 && by_heads(task_)),
        streams_(task_.rows > kGroup && streams(problem.out)),
        all_(span.all()),
        to_store_(all_, by_heads_) {}

  // Adds the sums over a part to those over all before it.
  void merge(int64_t part, const Sums& sums) {
    for (int64_t group = 0; group < groups_; ++group) {
      if (last_visible(group) <= part * kPart) continue;
      merge_weights(group, sums.weights + group * group_rows_ * 16, sums.max + group * group_rows_);
      merge_values(group, sums.values + group * group_rows_ * lane_groups_ * 16, 0, lane_groups_);
    }
  }

  void store_rows() { store_rows(rows_); }

 protected:
  // Those before `end` that are not stored yet.
  void store_rows(int64_t end) {
    for (; stored_ < end; ++stored_, to_store_.next()) {
      const int64_t r = stored_;
      const float total = sum(load(scratch_.all_sum + r * 16));
      if (problem_.lse) {
        *to_store_.element<float>(problem_.lse) = (scratch_.all_shift[r] + std::log2(total)) * 0.693147180559945309f;
      }
      const Vec factor = set(1.0f / total);
      const float* o = scratch_.all_o + r / group_rows_ * group_rows_ * lane_groups_ * 16 + r % group_rows_ * 16;
      bf16* out = to_store_.element<bf16>(problem_.out);
      // + 0: no negative zero, whatever zeros were added before
      if (streams_) {
        for (int64_t i = 0; i < d_; i += 32, o += 2 * group_rows_ * 16) {
          const Vec left = load(o) * factor + zero(), right = load(o + group_rows_ * 16) * factor + zero();
          _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i), (__m512i)_mm512_cvtne2ps_pbh(right.v, left.v));
        }
        continue;
      }
      for (int64_t i = 0; i < d_; i += 16, o += group_rows_ * 16) {
        const Vec value = load(o) * factor + zero();
        if (d_ - i < 16) {
          store(out + i, value, d_ - i);
        } else {
          store(out + i, value);
        }
      }
    }
  }

  int64_t last_visible(int64_t group) const { return scratch_.visible[std::min((group + 1) * group_rows_, rows_) - 1]; }
  // Where the span's tokens end for a group.
  int64_t end_of(int64_t group) const { return std::min(last_visible(group), span_.end * kPart); }
  int64_t rows_in(int64_t group) const { return std::min(group_rows_, rows_ - group * group_rows_); }

  bool begins_part(const Unit& unit) const { return unit.begin % kPart == 0; }
  bool ends_part(const Unit& unit) const {
    const int64_t end = unit.begin + unit.pages * kBlock;
    return end % kPart == 0 || end >= last_visible(unit.group);
  }
  bool last_of_group(const Unit& unit) const { return unit.begin + unit.pages * kBlock >= end_of(unit.group); }
  Sums left(int64_t part) const { return sums_of_part(parts_, part - span_.begin, task_.rows, lane_groups_ * 16); }

  float* output(const Unit& unit) const {
    const int64_t part = unit.begin / kPart;
    float* const o = span_.begin > 0 ? left(part).values : part > 0 ? scratch_.o : scratch_.all_o;
    return o + unit.group * group_rows_ * lane_groups_ * 16;
  }

  // When all weights of a part were added up.
  void close_weights(const Unit& unit) {
    if (!ends_part(unit)) return;
    const int64_t group = unit.group, first = group * group_rows_, part = unit.begin / kPart;
    float *const sum = sums_[group], *const shift = scratch_.shift + first;
    if (span_.begin == 0 && part > 0) {
      merge_weights(group, sum, shift);
    } else {
      const Sums to = span_.begin > 0 ? left(part) : Sums{nullptr, scratch_.all_sum, scratch_.all_shift};
      std::copy_n(sum, rows_in(group) * 16, to.weights + first * 16);
      std::copy_n(shift, rows_in(group), to.max + first);
    }
  }

  // Whether the unit's values, when all are added up, are to be merged; after close_weights.
  bool merges(const Unit& unit) const { return span_.begin == 0 && unit.begin >= kPart && ends_part(unit); }

  void merge_weights(int64_t group, const float* sum, const float* shift) {
    const int64_t first = group * group_rows_;
    for (int64_t r = 0; r < rows_in(group); ++r) {
      float& all_shift = scratch_.all_shift[first + r];
      const float new_shift = std::max(all_shift, shift[r]);
      const __m512 of_all = power_of_two(_mm512_set1_ps(all_shift - new_shift));
      const __m512 of_part = power_of_two(_mm512_set1_ps(shift[r] - new_shift));
      float* const all_sum = scratch_.all_sum + (first + r) * 16;
      _mm512_store_ps(all_sum, _mm512_fmadd_ps(_mm512_load_ps(sum + r * 16), of_part,
                                               _mm512_mul_ps(_mm512_load_ps(all_sum), of_all)));
      scratch_.of_all[first + r] = _mm512_cvtss_f32(of_all);
      scratch_.of_part[first + r] = _mm512_cvtss_f32(of_part);
      all_shift = new_shift;
    }
  }

  float* all_values(int64_t group) const { return scratch_.all_o + group * group_rows_ * lane_groups_ * 16; }

  void merge_values(int64_t group, const float* from, int64_t first, int64_t count) {
    float* const to = all_values(group);
    const float* const of_all = scratch_.of_all + group * group_rows_;
    const float* const of_part = scratch_.of_part + group * group_rows_;
    for (int64_t i = first; i < first + count; ++i) {
      for (int64_t r = 0; r < rows_in(group); ++r) {
        const int64_t at = (i * group_rows_ + r) * 16;
        const __m512 old = _mm512_mul_ps(_mm512_load_ps(to + at), _mm512_set1_ps(of_all[r]));
        _mm512_store_ps(to + at, _mm512_fmadd_ps(_mm512_load_ps(from + at), _mm512_set1_ps(of_part[r]), old));
      }
    }
  }

  // Whether the rows are taken head by head, so that the 16 rows of a tile lie as far apart as tokens do, and need not
  // be packed. Where many pages meet them, packing is the lesser cost.
  static bool by_heads(const Task& task) {
    return task.rows > kGroup && task.seen() <= kPart / 2 && task.rows % kGroup == 0 && task.row % task.heads == 0 &&
           task.rows % (16 * task.heads) == 0;
  }

  // Whether results would leave the caches anyway, and consist of whole lines.
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
  const int64_t d_, lane_groups_;
  const int64_t group_rows_, rows_, groups_;  // a group of rows: up to kGroup of a task, or one of several heads' tasks
  const bool by_heads_;
  const bool streams_;  // whether rows are stored past the caches
  const Task all_;
  int64_t stored_ = 0;  // rows
  RowWalk to_store_;
  float *sums_[kMostGroups], *spare_sums_;  // of a group's rows over a part, 16 lanes each
};

}  // namespace tilerank::TR_RUNG
