// Products of rows that are quantised to int8 with packed weights in vectors, compiled once per rung (no include guard;
// include after the forms of products, gemm_int8-inl.h). A form says what a step of the products is: its inputs, how
// codes are stored and multiplied, and how their sums are scaled.

namespace tilerank::TR_RUNG {

// The micro-kernels. exact[R][kInt8VecsAtOnce] = one step of R rows x kInt8VecsAtOnce vectors of outputs.
template <class Form, int R>
[[gnu::noinline]] static void multiply_int8_step(const char* x, const char* weight, Int8Prefetch ahead, Ints* exact) {
  Ints sums[R][kInt8VecsAtOnce] = {};
  if constexpr (Form::kStarts) start_sums<R>(x + R * Form::kRowCodes, sums);
  Form::template dot<R>(x, weight, ahead, sums);
  for_int8_rows<R>([&](int r) __attribute__((always_inline)) {
    exact[r * kInt8VecsAtOnce] = sums[r][0];
    exact[r * kInt8VecsAtOnce + 1] = sums[r][1];
  });
}

#ifdef TR_AVX512
// totals[R][kInt8Vecs] = all steps of R rows x a block, whose codes are expanded in registers.
template <class Form, int R>
[[gnu::noinline]] static void multiply_int8_stored(const char* x, const typename Form::Block& block, int64_t steps,
                                                   Vec* totals) {
  const char* stored = block.codes;
  Vec kept[R][kInt8VecsAtOnce] = {};  // in registers, too
  for (int64_t step = 0; step < steps; ++step, stored += Form::kStoredBytes) {
    const char* const starts = x + R * Form::kRowCodes;
    Ints sums[R][kInt8VecsAtOnce] = {};
    if constexpr (Form::kStarts) start_sums<R>(starts, sums);
    Form::template dot_stored<R>(x, stored, sums);
    const auto by = block.step(step, 0);
    for_int8_rows<R>([&](int r) __attribute__((always_inline)) {
      const char* const start = starts + r * sizeof(int32_t);
      const Vec scale = set(load_float(start + R * sizeof(int32_t)));
      kept[r][0] = by.add(0, sums[r][0], start, scale, kept[r][0]);
      kept[r][1] = by.add(1, sums[r][1], start, scale, kept[r][1]);
    });
    x = starts + R * (sizeof(int32_t) + sizeof(float));
  }
  for_int8_rows<R>([&](int r) __attribute__((always_inline)) {
    totals[r * kInt8Vecs] = kept[r][0];
    totals[r * kInt8Vecs + 1] = kept[r][1];
  });
}
template <class Form, int R>
static inline void multiply_int8_stored(int64_t rows, const char* x, const typename Form::Block& block, int64_t steps,
                                        Vec* totals) {
  if constexpr (R > 0) {
    if (rows == R) return multiply_int8_stored<Form, R>(x, block, steps, totals);
    multiply_int8_stored<Form, R - 1>(rows, x, block, steps, totals);
  }
}
#endif

// totals[R][kInt8Vecs] += `steps` steps, from `first` on, of R rows x half `half` of the vectors of a block. weight:
// the codes of this half, as they are multiplied.
template <class Form, int R>
[[gnu::noinline]] static void multiply_int8_tile(const char* x, const char* weight, const typename Form::Block& block,
                                                 int64_t first, int64_t steps, int half, Int8Prefetch ahead,
                                                 Vec* totals) {
  Ints exact[R * kInt8VecsAtOnce];
  for (int64_t step = first; step < first + steps; ++step, weight += Form::kWeightBytes) {
    multiply_int8_step<Form, R>(x, weight, ahead, exact);
    ahead.at += ahead.step * Form::kFetches;
    const char* const starts = x + R * Form::kRowCodes;
    const auto by = block.step(step, half);
    for (int r = 0; r < R; ++r) {
      const char* const start = starts + r * sizeof(int32_t);
      const Vec scale = set(load_float(start + R * sizeof(int32_t)));
      Vec* const to = totals + r * kInt8Vecs;
      to[0] = by.add(0, exact[r * kInt8VecsAtOnce], start, scale, to[0]);
      to[1] = by.add(1, exact[r * kInt8VecsAtOnce + 1], start, scale, to[1]);
    }
    x = starts + R * (sizeof(int32_t) + sizeof(float));
  }
}
template <class Form, int R>
[[gnu::noinline]] static void multiply_int8_tile(const char* x, const char* weight, const typename Form::Block&,
                                                 int64_t first, int64_t steps, int, Int8Prefetch ahead, Ints* totals) {
  Ints sums[R][kInt8VecsAtOnce] = {};
  if (first == 0) start_sums<R>(x + R * Form::kRowCodes, sums);
  for (int64_t step = 0; step < steps; ++step, weight += Form::kWeightBytes) {
    Form::template dot<R>(x, weight, ahead, sums);
    x += R * (Form::kRowCodes + sizeof(int32_t) + sizeof(float));
  }
  for_int8_rows<R>([&](int r) __attribute__((always_inline)) {
    Ints* const to = totals + r * kInt8Vecs;
    to[0] = add(to[0], sums[r][0]);
    to[1] = add(to[1], sums[r][1]);
  });
}

template <class Form, int R>
static inline void multiply_int8_rows(int64_t rows, const char* x, const char* weight,
                                      const typename Form::Block& block, int64_t first, int64_t steps, int half,
                                      Int8Prefetch ahead, typename Form::Sum* totals) {
  if constexpr (R > 0) {
    if (rows == R) return multiply_int8_tile<Form, R>(x, weight, block, first, steps, half, ahead, totals);
    multiply_int8_rows<Form, R - 1>(rows, x, weight, block, first, steps, half, ahead, totals);
  }
}

// Quantised rows that are multiplied with one block of the weight before the next, in tiles of about equal size:
// [tile][steps], where a step is stored as above.
template <class Form>
struct Int8Stripe {
  using Weight = typename Form::Weight;
  using Block = typename Form::Block;
  using Sum = typename Form::Sum;
  char* codes;
  int64_t rows, k;

  static constexpr int64_t kMostRows = 20 * kInt8Rows;
  static constexpr int64_t kStepBytes = Form::kRowCodes + sizeof(int32_t) + sizeof(float);  // of a row
  static constexpr int64_t kManyRowsPanel = 16 << 10;
  // Totals of two blocks, then an expanded panel.
  static constexpr size_t kTotals = 2 * kMostRows * kInt8Vecs;
  static constexpr size_t kWorking = kTotals * sizeof(Sum) + (Form::kExpands ? kManyRowsPanel : 0);

  static int64_t row_bytes(int64_t k) { return blocks(k, Form::kInputs) * kStepBytes; }

  int64_t tiles() const { return blocks(rows, kInt8Rows); }
  int64_t first_row(int64_t tile) const { return rows * tile / tiles(); }
  int64_t rows_of(int64_t tile) const { return first_row(tile + 1) - first_row(tile); }
  char* tile_at(int64_t tile) const { return codes + first_row(tile) * row_bytes(k); }

  // Quantises the rows `own`; input(row) points to the k inputs of a row.
  template <class Input>
  void put(Range own, const Input& input) const {
    for (int64_t tile = 0; tile < tiles(); ++tile) {
      const int64_t first = first_row(tile);
      const Range some{std::max(own.begin, first), std::min(own.end, first_row(tile + 1))};
      if (some.begin < some.end) put_some(tile, some, input);
    }
  }

  // totals[rows][kInt8Vecs] = the rows x a block. All tiles of rows are multiplied with one panel of the block, which
  // stays in the L1 cache, while the next panel is prefetched. panel_memory: of an expanded panel
  void multiply(const Block& block, Sum* totals, char* panel_memory) const {
    std::fill_n(totals, rows * kInt8Vecs, Sum{});
    const int64_t count = tiles(), steps = blocks(k, Form::kInputs);
    if constexpr (Form::kExpandedRows > 0) {
      if (rows <= Form::kExpandedRows) {
        return multiply_int8_stored<Form, Form::kExpandedRows>(rows, codes, block, steps, totals);
      }
    }
    // With few rows, L1 also holds what is prefetched.
    const int64_t panel = (count > 4 ? kManyRowsPanel : Form::kFewRowsPanel) / Form::kWeightBytes;
    for (int64_t first = 0; first < steps; first += panel) {
      const int64_t wide = std::min(panel, steps - first), bytes = wide * Form::kStoredBytes;
      const char* const stored = block.codes + first * Form::kStoredBytes;
      const char* const weight = Form::expanded(stored, wide, panel_memory);
      for (int64_t tile = 0; tile < count; ++tile) {
        const int64_t own = rows_of(tile);
        const char* const x = tile_at(tile) + first * own * kStepBytes;
        const bool in_order = count == 1 && own <= kInt8RowsInOrder && follows_streams();
        const char* const next = stored + (in_order ? 0 : std::max(bytes, kLeastAhead)) + bytes * tile / count;
        Sum* const to = totals + first_row(tile) * kInt8Vecs;
        const int64_t fetch = blocks(Form::kStoredBytes / Form::kFetches, count);
        for (int half = 0; half < kInt8Vecs / kInt8VecsAtOnce; ++half) {
          multiply_int8_rows<typename Form::Products, kInt8Rows>(own, x, weight + half * Form::kHalfBytes, block, first,
                                                                 wide, half, {next, fetch},
                                                                 to + half * kInt8VecsAtOnce);
        }
      }
    }
  }

  // Computes a result of all rows from `parts` blocks (1 or 2) of a weight, from `block` on. emit(row, values, last)
  // receives the products of a row with the first and the last of them. memory: kWorking
  template <class Emit>
  void multiply(const Weight& w, int64_t block, int64_t parts, char* memory, const Emit& emit) const {
    Sum *const totals = reinterpret_cast<Sum*>(memory), *const last_totals =
                                                            totals + (parts - 1) * kMostRows * kInt8Vecs;
    char* const panel = reinterpret_cast<char*>(totals + kTotals);
    const Block first(w, block), last(w, block + parts - 1);
    multiply(first, totals, panel);
    if (parts == 2) multiply(last, last_totals, panel);
    for (int64_t tile = 0; tile < tiles(); ++tile) {
      const int64_t begin = first_row(tile), count = rows_of(tile);
      const char* const scales = tile_at(tile) + count * (Form::kRowCodes + sizeof(int32_t));
      for (int64_t row = begin; row < begin + count; ++row) {
        const auto values = [&](const Block& of, const Sum* sums) {
          Vec32 to;
          for (int v = 0; v < kInt8Vecs; ++v) {
            to[v] = of.value(v, sums[row * kInt8Vecs + v], load_float(scales + (row - begin) * sizeof(float)));
          }
          return to;
        };
        const Vec32 gate = values(first, totals);
        emit(row, gate, parts == 2 ? values(last, last_totals) : gate);
      }
    }
  }

 private:
  static constexpr int64_t kLeastAhead = 4 << 10;  // bytes between a product and its prefetches

  // Quantises rows of one tile, kInt8TileK inputs at a time.
  template <class Input>
  void put_some(int64_t tile, Range own, const Input& input) const {
    constexpr int64_t kSteps = kInt8TileK / Form::kInputs, kQuad = Form::kRowCodes * 4 / Form::kInputs;
    const int64_t count = rows_of(tile), at = own.begin - first_row(tile), some = own.end - own.begin;
    const int64_t step_bytes = count * kStepBytes, all = blocks(k, Form::kInputs);
    Quantiser quantisers[kInt8Rows];
    for (int64_t r = 0; !Form::kGrouped && r < some; ++r) {
      quantisers[r] = Quantiser(largest_bits(input(own.begin + r), k));
    }
    alignas(64) int8_t codes[kInt8Rows][kInt8TileK] = {};
    float scales[kInt8Rows][kSteps];
    char* to = tile_at(tile);
    int32_t* const first_starts = reinterpret_cast<int32_t*>(to + count * Form::kRowCodes) + at;
    for (int64_t first = 0; first < all; first += kSteps, to += kSteps * step_bytes) {
      const int64_t i = first * Form::kInputs;
      const int64_t inputs = std::min(kInt8TileK, k - i), steps = std::min(kSteps, all - first);
      for (int64_t r = 0; r < some; ++r) {
        const auto* const x = input(own.begin + r) + i;
        if constexpr (Form::kGrouped) {
          quantise_steps<Form::kInputs>(x, inputs, codes[r], scales[r]);
        } else {
          store_codes(codes[r], x, inputs, quantisers[r]);
          scales[r][0] = quantisers[r].scale;
        }
      }
      char* const to_starts = to + count * Form::kRowCodes + at * sizeof(int32_t);
      Form::pack(to + at * kQuad, count * kQuad, step_bytes, codes, some, steps, to_starts);
      for (int64_t step = 0; step < steps; ++step) {
        int32_t* const starts = reinterpret_cast<int32_t*>(to_starts + step * step_bytes);
        float* const to_scales = reinterpret_cast<float*>(starts + count);
        for (int64_t r = 0; r < some; ++r) {
          to_scales[r] = scales[r][step];
          starts[r] = stored_start<Form>(starts[r], scales[r][step]);
          if (!Form::kGrouped && first > 0) first_starts[r] += starts[r];
        }
      }
    }
  }
};

}  // namespace tilerank::TR_RUNG
