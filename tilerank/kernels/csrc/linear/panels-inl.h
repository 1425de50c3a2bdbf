// The vector micro-kernels: products of panels of rows with blocks of packed weights, compiled once per rung (no
// include guard; include after pack.h).
//
// Rows are packed as panels of up to kPanelRows rows. A panel consists of units that one instruction broadcasts to all
// lanes: one fp32 input or, on rungs that multiply pairs of bf16, a pair. A micro-kernel keeps the sums of a panel with
// a block of 32 outputs in registers, or with one half of it after the other. Every sum accumulates over k in order, in
// one chain across all parts of k. The order does not depend on the number of rows, so neither do the bits of a row.

#include "linear/prefetch-inl.h"
#include "simd/transpose-inl.h"

namespace tilerank::TR_RUNG {

constexpr int kVecs = kBlockN / kLanes;  // vectors of a row's sums with a block
// Rows of a panel. Their sums with two vectors of outputs, the weights and one input fill the registers.
constexpr int kPanelRows = kLanes == 16 ? 14 : 6;
constexpr int kWholeBlockRows = kLanes == 16 ? 14 : 3;  // the same with all vectors of a block
constexpr int64_t kPartUnits = 384;                     // units of a part of k: those of a panel stay in the L1 cache

#ifdef TR_BF16
template <class T>
constexpr bool kPaired = std::is_same_v<T, bf16>;
#else
template <class T>
constexpr bool kPaired = false;
#endif
template <class T>
using Unit = std::conditional_t<kPaired<T>, uint32_t, float>;

// Bytes of a weight block per unit.
template <class T>
constexpr int64_t kUnitBytes = kBlockN * static_cast<int64_t>(sizeof(T)) * (kPaired<T> ? 2 : 1);

// Units of k inputs. bf16 inputs are padded to whole pairs.
template <class T>
constexpr int64_t units_of(int64_t k) {
  return kPaired<T> ? (k + 1) / 2 : std::is_same_v<T, bf16> ? (k + 1) / 2 * 2 : k;
}

// Elements of a weight block over k inputs.
template <class T>
constexpr int64_t block_elements(int64_t k) {
  return std::is_same_v<T, float> ? k * kBlockN : blocks(k, kTileK) * 2 * kTile;
}

// Memory to prefetch during a product, `step` bytes for every line of weights.
struct Prefetch {
  const char* at;
  int64_t step;

  template <int R>
  void fetch() {
    prefetch_weight<R>(at);
    at += step;
  }
};
struct NoPrefetch {
  template <int R>
  void fetch() {}
};

// R rows of V vectors; the rows are float[32].
template <int R, int V>
static inline void load_sums(const float* from, Vec (&sums)[R][V]) {
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[r][v] = from ? load(from + r * kBlockN + v * kLanes) : zero();
  }
}

template <int R, int V>
static inline void store_sums(float* to, const Vec (&sums)[R][V]) {
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(to + r * kBlockN + v * kLanes, sums[r][v]);
  }
}

// A unit broadcast to all lanes, and its product.
static inline Vec broadcast(float unit) { return set(unit); }
#ifdef TR_BF16
struct PairVec {
  Ints v;
};
static inline PairVec broadcast(uint32_t unit) { return {words(static_cast<int32_t>(unit))}; }
static inline Vec fma(PairVec a, PairVec b, Vec c) { return add_dot(c, a.v, b.v); }
#endif

// Returns a * b + sum. With AVX2, in the register of the sum and at this place: GCC would move sums, and spill some of
// them to broadcast several inputs first.
template <class Operand>
static inline Vec fma_in_place(Operand a, Operand b, Vec sum) {
#ifdef TR_AVX2
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum.v) : "x"(a.v), "x"(b.v));
  return sum;
#else
  return fma(a, b, sum);
#endif
}

// sums += one unit of R rows x its weights; weight(v) loads vector v. Keeps the smaller operand in registers.
template <int R, class U, class Weight, int V>
static inline void add_unit(const U* x, const Weight& weight, Vec (&sums)[R][V]) {
  if constexpr (R < V) {
    decltype(broadcast(*x)) inputs[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) inputs[r] = broadcast(x[r]);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const auto w = weight(v);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[r][v] = fma(inputs[r], w, sums[r][v]);
    }
  } else {
    decltype(weight(0)) w[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) w[v] = weight(v);
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
      const auto input = broadcast(x[r]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[r][v] = fma_in_place(input, w[v], sums[r][v]);
    }
  }
}

// The overloads of add_units compute sums += units of R rows, x[unit][R], times V vectors of the weights of 32 outputs,
// from vector kFirst on.

// fp32 weights, weight[unit][32 outputs]
template <int R, int kFirst, int V, class A>
[[gnu::always_inline]] static inline void add_units(const float* x, const float* weight, int64_t units, A& ahead,
                                                    Vec (&sums)[R][V]) {
  for (int64_t i = 0; i < units; ++i, x += R, weight += kBlockN) {
    ahead.template fetch<R>();
    if (V == kVecs) ahead.template fetch<R>();
    add_unit<R>(x, [&](int v) { return load(weight + (kFirst + v) * kLanes); }, sums);
  }
}

// Returns vector v of the weights of a pair of inputs; a block has two tiles of 16 outputs.
static inline const bf16* vector_of_pair(const bf16* pair, int v) {
  return pair + v * kLanes / 16 * kTile + v * kLanes % 16 * 2;
}

constexpr int64_t kUnitsOfPair = kPaired<bf16> ? 1 : 2;

// The weights of a pair of inputs for kLanes outputs, as operands of the product.
#ifdef TR_BF16
using Pair = PairVec;
static inline Pair load_pair(const bf16* p) { return {load_ints(p)}; }
#else
using Pair = Two;
static inline Pair load_pair(const bf16* p) { return load_pairs(p); }

// load_pairs(p).b, loaded and masked from memory, because sums may leave no register to keep the pairs or the mask.
static inline Vec load_second(const bf16* p) {
#ifdef TR_AVX512
  asm("" : "+r"(p));
  return load_pairs(p).b;
#else
  alignas(32) static constexpr uint32_t kUpper[kLanes] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                                          0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};
  Vec second;
  asm("vmovdqu %1, %0\n\tvpand %2, %0, %0"
      : "=x"(second.v)
      : "m"(*reinterpret_cast<const uint16_t (*)[2 * kLanes]>(p)), "m"(kUpper));
  return second;
#endif
}
#endif

// sums[r][v] += row r x a pair of inputs, for R rows.
template <int R, int V>
[[gnu::always_inline]] static inline void add_pair(const Unit<bf16>* x, const Pair& pair, int v, Vec (&sums)[R][V]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#ifdef TR_BF16
    sums[r][v] = fma(broadcast(x[r]), pair, sums[r][v]);
#else
    sums[r][v] = fma(broadcast(x[R + r]), pair.b, fma(broadcast(x[r]), pair.a, sums[r][v]));
#endif
  }
}

// bf16 weights, at most the inputs of a tile
template <int R, int kFirst, int V, class A>
[[gnu::always_inline]] static inline void add_units(const Unit<bf16>* x, const bf16* weight, int64_t units, A& ahead,
                                                    Vec (&sums)[R][V]) {
  const bf16* const end = weight + units / kUnitsOfPair * 32;
  for (const bf16* pair = weight; pair != end; pair += 32, x += R * kUnitsOfPair) {
    ahead.template fetch<R>();
    if (V == kVecs) ahead.template fetch<R>();
    if constexpr (R * V <= kRowsInOrder) {
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) add_pair<R>(x, load_pair(vector_of_pair(pair, kFirst + v)), v, sums);
    } else {
#ifdef TR_BF16
      add_unit<R>(x, [&](int v) { return load_pair(vector_of_pair(pair, kFirst + v)); }, sums);
#else
      add_unit<R>(x, [&](int v) { return load_pairs(vector_of_pair(pair, kFirst + v)).a; }, sums);
      add_unit<R>(x + R, [&](int v) { return load_second(vector_of_pair(pair, kFirst + v)); }, sums);
#endif
    }
  }
}

// Units of a tile of inputs.
template <class W>
constexpr int64_t kTileUnits = kPaired<W> ? kTileK / 2 : kTileK;

// The micro-kernel: sums[R][32] = or, if `accumulate`, += R rows x a block, over `units` units, tile by tile. With few
// rows, and where registers do not hold the sums with a whole block, one half of it is multiplied after the other.
// Not inlined: the loops of its callers would cost it registers.
template <int R, class U, class W>
[[gnu::noinline]] static void multiply_panel(const U* x, const W* weight, int64_t units, float* sums, bool accumulate,
                                             Prefetch ahead) {
  constexpr int kHalf = kVecs / 2;
  const auto for_tiles = [&](const auto& f) {
    for (int64_t left = units; left > 0; left -= kTileUnits<W>) {
      f(std::min(left, kTileUnits<W>));
      x += kTileUnits<W> * R, weight += kTileK * kBlockN;
    }
  };
  if constexpr (std::is_same_v<W, float> ? R <= kWholeBlockRows : kLanes == 16 && R > kRowsInOrder) {
    Vec whole[R][kVecs];
    load_sums(accumulate ? sums : nullptr, whole);
    for_tiles([&](int64_t some) { add_units<R, 0>(x, weight, some, ahead, whole); });
    store_sums(sums, whole);
  } else if constexpr (R * kVecs <= 8) {
    Vec first[R][kHalf], second[R][kHalf];
    load_sums(accumulate ? sums : nullptr, first);
    load_sums(accumulate ? sums + kBlockN / 2 : nullptr, second);
    for_tiles([&](int64_t some) {
      add_units<R, 0>(x, weight, some, ahead, first);
      add_units<R, kHalf>(x, weight, some, ahead, second);
    });
    store_sums(sums, first);
    store_sums(sums + kBlockN / 2, second);
  } else {
    for_tiles([&](int64_t some) {
      Vec half[R][kHalf];
      load_sums(accumulate ? sums : nullptr, half);
      add_units<R, 0>(x, weight, some, ahead, half);
      store_sums(sums, half);
      load_sums(accumulate ? sums + kBlockN / 2 : nullptr, half);
      add_units<R, kHalf>(x, weight, some, ahead, half);
      store_sums(sums + kBlockN / 2, half);
      accumulate = true;
    });
  }
}

// Calls f(R) with the compile-time constant R = rows, which is between 1 and `most`.
template <int most, class F>
static inline void for_rows(int64_t rows, const F& f) {
  if constexpr (most > 1) {
    if (rows < most) return for_rows<most - 1>(rows, f);
  }
  f(std::integral_constant<int, most>{});
}

// Reads inputs of a row as units, without the ones beyond the last.
template <class T>
static inline void read_units(const T* inputs, int64_t count, Unit<T>* to) {
  if constexpr (kPaired<T>) {
    std::memcpy(to, inputs, static_cast<size_t>(count) * sizeof(T));
  } else {
    for_lanes(count, [&](int64_t i, auto lanes) { lanes.store(to + i, lanes.load(inputs + i)); });
  }
}

// to[unit * stride + row] = from[row][unit]
template <class U>
static inline void transpose_units(const U (&from)[16][16], int64_t rows, int64_t units, U* to, int64_t stride) {
#ifdef TR_AVX512
  Ints lines[16], columns[16];
  for (int r = 0; r < 16; ++r) lines[r] = load_ints(from[r]);
  transpose(lines, columns);
  for (int64_t i = 0; i < units; ++i) store(to + i * stride, columns[i], rows);
#else
  for (int64_t i = 0; i < units; ++i) {
    for (int64_t r = 0; r < rows; ++r) to[i * stride + r] = from[r][i];
  }
#endif
}

// Rows packed as panels of about equal size: [parts of k, `part` units each][panels][units of the part][rows of the
// panel].
template <class T>
class RowPanels {
 public:
  static size_t bytes(int64_t m, int64_t k) { return static_cast<size_t>(m * units_of<T>(k)) * sizeof(Unit<T>); }

  // units: at least those of k; the units beyond k are zero.
  RowPanels(void* memory, int64_t m, int64_t k) : RowPanels(memory, m, k, 0, part_of(m, units_of<T>(k)), kPanelRows) {}
  RowPanels(void* memory, int64_t m, int64_t k, int64_t units, int64_t part, int64_t most_rows)
      : m(m),
        units(std::max(units, units_of<T>(k))),
        part(part),
        panels(blocks(m, most_rows)),
        k_(k),
        data_(static_cast<Unit<T>*>(memory)) {}

  // Packs the rows; row(i) points to the inputs of row i. pack: this thread's share; pack_all: everything.
  template <class Row>
  void pack(const Row& row, const Team& team) const {
    pack(row, team.share(pieces()));
  }
  template <class Row>
  void pack_all(const Row& row) const {
    pack(row, Range{0, pieces()});
  }

  int64_t first_row(int64_t panel) const { return m * panel / panels; }
  int64_t rows(int64_t panel) const { return first_row(panel + 1) - first_row(panel); }

  // The units of a part of k whose inputs of all rows stay in the L2 cache, beside the weights that pass through it.
  static int64_t part_of(int64_t m, int64_t units) {
    constexpr int64_t kBytes = 288 << 10;
    const int64_t most = std::max<int64_t>(kBytes / (m * static_cast<int64_t>(sizeof(Unit<T>))), kPartUnits);
    return blocks(blocks(units, blocks(units, most)), kPartUnits) * kPartUnits;
  }

  // Returns a panel's units from `unit` on; they are contiguous up to the end of the part.
  const Unit<T>* at(int64_t panel, int64_t unit) const {
    const int64_t begin = unit / part * part, part_units = std::min(part, units - begin);
    return data_ + begin * m + first_row(panel) * part_units + (unit - begin) * rows(panel);
  }

  const int64_t m, units, part, panels;

 private:
  // Units packed at a time: a part, or kPartUnits if there is only one part.
  int64_t piece_units() const { return units <= part ? kPartUnits : part; }
  int64_t pieces() const { return blocks(units, piece_units()) * panels; }

  template <class Row>
  void pack(const Row& row, Range own) const {
    for (int64_t piece = own.begin; piece < own.end; ++piece) pack(row, piece % panels, piece / panels * piece_units());
  }

  // Packs a piece of a panel, a few units of all rows at a time: rows are often a power of two apart and would evict
  // each other if they were read in longer runs.
  template <class Row>
  void pack(const Row& row, int64_t panel, int64_t begin) const {
    constexpr int64_t kSome = 16, kInputs = kPaired<T> ? 2 : 1;
    const int64_t first = first_row(panel), count = rows(panel), end = std::min(begin + piece_units(), units);
    const auto inputs = [&](int64_t begin, int64_t end) { return std::clamp(k_, begin, end) - begin; };
    Unit<T>* to = const_cast<Unit<T>*>(at(panel, begin));
    if (count == 1) {
      const int64_t there = inputs(begin * kInputs, end * kInputs);
      std::fill(to + there / kInputs, to + end - begin, 0);
      return read_units<T>(row(first) + begin * kInputs, there, to);
    }
    for (int64_t unit = begin; unit < end; unit += kSome, to += kSome * count) {
      alignas(64) Unit<T> from[kSome][kSome] = {};
      const int64_t there = inputs(unit * kInputs, (unit + kSome) * kInputs);
      for (int64_t r = 0; r < count; ++r) read_units<T>(row(first + r) + unit * kInputs, there, from[r]);
      transpose_units(from, count, std::min(kSome, end - unit), to, count);
    }
  }

  const int64_t k_;
  Unit<T>* const data_;
};

}  // namespace tilerank::TR_RUNG
