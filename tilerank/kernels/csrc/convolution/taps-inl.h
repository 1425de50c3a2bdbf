// Products of shifted rows with a packed weight, compiled once per rung (no include guard; include after
// linear/panels-inl.h and stripes-inl.h).
//
// A stripe of rows is packed once for all taps and outputs, as packed[unit][row] (panels-inl.h: units), so that a panel
// of rows is found at any shift. The sums of a panel with a block of outputs stay in registers. They accumulate over
// the inputs in pieces of kTileK, over the taps within a piece, whose rows are still in the L1 cache, and over the
// units of the piece, whatever the number of rows.

namespace tilerank::TR_RUNG {

constexpr int64_t kMostRows = 16 * kWholeBlockRows;

template <class T>
class ShiftedRows {
 public:
  // x: [m + (taps - 1) * dilation, c]
  ShiftedRows(const Tensor& x, int64_t taps, int64_t dilation)
      : x_(x),
        taps_(taps),
        dilation_(dilation),
        before_((taps - 1) * dilation),
        m_(x.size[0] - before_),
        units_(units_of<T>(x.size[1])),
        rows_(std::min(m_,
                       std::clamp(kStripeBytes / (units_ * kUnit) - before_, 4 * int64_t{kWholeBlockRows}, kMostRows))),
        // An odd number of cache lines, so that the same rows of all units spread over the cache sets.
        stride_((blocks(rows_ + before_ + kPadding, 16) | 1) * 16) {}

  int64_t stripes() const { return blocks(m_, rows_); }
  size_t bytes() const { return static_cast<size_t>(blocks(units_, 16) * 16 * stride_ * kUnit); }

  // Elements of a block of 32 outputs of the weight.
  int64_t block_elements() const {
    return taps_ == 1 ? TR_RUNG::block_elements<T>(x_.size[1]) : taps_ * pieces() * kPieceElements;
  }

  void pack(int64_t stripe, Unit<T>* packed) const {
    const int64_t first = stripe * rows_, count = std::min(rows_, m_ - first) + before_;
    for (int64_t row = 0; row < count; row += 16) {
      for (int64_t unit = 0; unit < units_; unit += 16) {
        const int64_t begin = unit * kInputs, inputs = std::min(x_.size[1], begin + 16 * kInputs) - begin;
        alignas(64) Unit<T> from[16][16] = {};
        for (int64_t r = 0; r < std::min<int64_t>(16, count - row); ++r) {
          read_units<T>(x_.row<const T>(first + row + r) + begin, inputs, from[r]);
        }
        transpose_units(from, 16, std::min<int64_t>(16, units_ - unit), packed + unit * stride_ + row, stride_);
      }
    }
  }

  // Multiplies a packed stripe with a block of 32 outputs. emit(row, sums, count): of `count` rows, float[count][32]
  template <class Emit>
  void multiply(int64_t stripe, const Unit<T>* packed, const T* block, const Emit& emit) const {
    const int64_t first = stripe * rows_, count = std::min(rows_, m_ - first), panels = blocks(count, kWholeBlockRows);
    alignas(64) float sums[kWholeBlockRows * kBlockN];
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t row = count * panel / panels, rows = count * (panel + 1) / panels - row;
      for_rows<kWholeBlockRows>(rows, [&](auto r) { multiply_panel<r>(packed + row, block, sums); });
      emit(first + row, sums, rows);
    }
  }

 private:
  static constexpr int64_t kInputs = kPaired<T> ? 2 : 1, kPiece = kTileK / kInputs, kPieceElements = kTileK * kBlockN;
  static constexpr int64_t kUnit = sizeof(Unit<T>), kPadding = 16;

  int64_t pieces() const { return blocks(units_, kPiece); }

  template <int R>
  [[gnu::noinline]] void multiply_panel(const Unit<T>* x, const T* block, float* to) const {
    Vec sums[R][kVecs];
    load_sums<R>(nullptr, sums);
    const int64_t pieces = this->pieces(), shift = dilation_, stride = stride_;
    for (int64_t piece = 0; piece < pieces; ++piece, x += kPiece * stride) {
      const int64_t units = std::min(kPiece, units_ - piece * kPiece);
      for (int64_t tap = 0; tap < taps_; ++tap) {
        add_piece<R>(x + tap * shift, stride, block + (tap * pieces + piece) * kPieceElements, units, sums);
      }
    }
    store_sums<R>(to, sums);
  }

  // sums += units of R rows, x[unit * stride][R], times the weights of 32 outputs.
  template <int R>
  [[gnu::always_inline]] static void add_piece(const Unit<T>* x, int64_t stride, const T* weight, int64_t units,
                                               Vec (&sums)[R][kVecs]) {
    if constexpr (std::is_same_v<T, float>) {
      for (const float* end = weight + units * kBlockN; weight != end; weight += kBlockN, x += stride) {
        add_unit<R>(x, [&](int v) { return load(weight + v * kLanes); }, sums);
      }
    } else {
      for (const bf16* end = weight + units / kUnitsOfPair * 32; weight != end; weight += 32, x += stride) {
#ifdef TR_BF16
        add_unit<R>(x, [&](int v) { return load_pair(vector_of_pair(weight, v)); }, sums);
#else
        add_unit<R>(x, [&](int v) { return load_pairs(vector_of_pair(weight, v)).a; }, sums);
        const bf16* again = weight;
        asm("" : "+r"(again));  // forces a second load: no register is left to keep the first
        x += stride;
        add_unit<R>(x, [&](int v) { return load_pairs(vector_of_pair(again, v)).b; }, sums);
#endif
      }
    }
  }

  const Tensor& x_;
  const int64_t taps_, dilation_, before_, m_, units_, rows_, stride_;
};

}  // namespace tilerank::TR_RUNG
