// The sequences of a step as the kernels with states see them (kernels/delta.py), shared by all rungs.
#pragma once
#include <algorithm>

#include "core/entry.h"

namespace tilerank {

// starts: null if every sequence has one row.
struct DeltaBatch {
  const int32_t *slots, *kept, *starts, *lengths;
  int64_t sequences;

  Range rows(int64_t i) const { return starts ? Range{starts[i], starts[i + 1]} : Range{i, i + 1}; }
  int64_t row_count(int64_t i) const { return rows(i).end - rows(i).begin; }
  bool is_padding(int64_t i) const { return slots[i] < 0; }
  // Whether the row of sequence i is a draft of what follows the sequence before it.
  bool is_draft(int64_t i) const { return i > 0 && !is_padding(i) && slots[i] == slots[i - 1]; }
  // Whether sequence i is neither padding nor a draft: its first row goes into its states.
  bool has_states(int64_t i) const { return !is_padding(i) && !is_draft(i); }
  // Whether the sequence begins in this step: its states are zeros, whatever the slot holds.
  bool is_fresh(int64_t i) const { return row_count(i) == lengths[i]; }

  // Returns the first sequence from i on that has states, or `sequences`.
  int64_t next(int64_t i) const {
    while (i < sequences && !has_states(i)) ++i;
    return i;
  }
  // Returns the end of the drafts of sequence i.
  int64_t drafts_end(int64_t i) const {
    ++i;
    while (i < sequences && is_draft(i)) ++i;
    return i;
  }

  // Calls f(row) for the rows of padding that repeat `row`.
  template <class F>
  void for_repeats(int64_t row, const F& f) const {
    for (int64_t i = 0; i < sequences; ++i) {
      if (slots[i] == -1 - row) f(rows(i).begin);
    }
  }

  // Checks everything that could make a kernel access memory outside its arguments. drafts: as in StateSlots.
  void check(const char* kernel, int64_t num_slots, int64_t num_rows, int64_t drafts) const {
    const auto fail = [&](const std::string& text) { throw Error(std::string(kernel) + ": " + text); };
    const auto text = [](int64_t number) { return std::to_string(number); };
    if (starts && (starts[0] != 0 || starts[sequences] != num_rows)) {
      fail("query_starts: expected 0 to " + text(num_rows) + ", found " + text(starts[0]) + " to " +
           text(starts[sequences]));
    }
    for (int64_t i = 0; i < sequences; ++i) {
      if (row_count(i) < 0 || row_count(i) > lengths[i]) {
        fail("query_starts: expected 0 to " + text(lengths[i]) + " rows of sequence " + text(i) + ", found " +
             text(row_count(i)));
      }
      if (slots[i] >= num_slots) {
        fail("slots: expected at most " + text(num_slots - 1) + " for sequence " + text(i) + ", found " +
             text(slots[i]));
      }
      if (is_padding(i) && (row_count(i) != 1 || !has_own_row(-1 - int64_t{slots[i]}))) {
        fail("slots: expected sequence " + text(i) + " of padding to be one row that repeats one, found slot " +
             text(slots[i]) + " and " + text(row_count(i)) + " rows");
      }
      if (has_states(i)) check_drafts(i, row_count(i) == 1 ? drafts : 0, fail);
    }
  }

 private:
  // Checks that sequence i has at most `most` drafts, of this step and of the one before.
  template <class F>
  void check_drafts(int64_t i, int64_t most, const F& fail) const {
    const auto refuse = [&](const char* name, int64_t found) {
      fail(std::string(name) + ": expected 0 to " + std::to_string(most) + " drafts of the sequence in slot " +
           std::to_string(slots[i]) + ", found " + std::to_string(found));
    };
    if (kept[i] < 0 || kept[i] > most) refuse("kept", kept[i]);
    const int64_t end = drafts_end(i);
    if (end - i - 1 > most) refuse("slots", end - i - 1);
    for (int64_t draft = i + 1; draft < end; ++draft) {
      if (row_count(draft) != 1) {
        fail("query_starts: expected a draft of one row as sequence " + std::to_string(draft) + ", found " +
             std::to_string(row_count(draft)));
      }
    }
  }

  // Whether the row is that of a sequence of one row with a slot.
  bool has_own_row(int64_t row) const {
    if (!starts) return row < sequences && !is_padding(row);
    const int64_t i = std::upper_bound(starts, starts + sequences + 1, row) - starts - 1;
    return i < sequences && row_count(i) == 1 && !is_padding(i);
  }
};

}  // namespace tilerank
