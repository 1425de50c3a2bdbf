// Products of rows with blocks of packed weights in vectors, for the rung that includes this file (no include guard;
// pack.h comes before).
//
// Rows are packed as panels of up to kPanelRows rows, in units that one load brings to all lanes: an input in fp32 or,
// where the rung multiplies pairs of bf16, a pair. A micro-kernel keeps the sums of a panel with a block of 32 outputs
// in registers. Every sum runs over k in order, in one chain that goes on from part to part of k, whatever the number
// of rows: a row's bits do not depend on its batch.

#include "transpose.h"

namespace tilerank::TR_RUNG {

constexpr int kVecs = kBlockN / kLanes;            // of a row's sums with a block
constexpr int kPanelRows = kLanes == 16 ? 14 : 3;  // their sums fill the registers, beside weights and an input
constexpr int64_t kPart = 384;                     // units of k: a panel's stay in the first-level cache

#ifdef TR_BF16
template <class T>
constexpr bool kPaired = std::is_same_v<T, bf16>;
#else
template <class T>
constexpr bool kPaired = false;
#endif
template <class T>
using Unit = std::conditional_t<kPaired<T>, uint32_t, float>;

// Bytes of a packed weight's block for each unit.
template <class T>
constexpr int64_t kUnitBytes = kBlockN * static_cast<int64_t>(sizeof(T)) * (kPaired<T> ? 2 : 1);

// A tile's last pair is whole.
template <class T>
constexpr int64_t units_of(int64_t k) {
  return kPaired<T> ? (k + 1) / 2 : std::is_same_v<T, bf16> ? (k + 1) / 2 * 2 : k;
}

// Elements of a packed weight's block over k inputs.
template <class T>
constexpr int64_t block_elements(int64_t k) {
  return std::is_same_v<T, float> ? k * kBlockN : blocks(k, kBlockK) * 2 * kTile;
}

// What to ask memory for while multiplying: for every unit, `step` bytes further.
struct Ahead {
  const char* at;
  int64_t step;

  void ask(int64_t units = 1) {
    _mm_prefetch(at, _MM_HINT_T0);
    _mm_prefetch(at + 64, _MM_HINT_T0);
    at += step * units;
  }
  void ask_half(int64_t units) {
    _mm_prefetch(at, _MM_HINT_T0);
    at += step * units / 2;
  }
};
struct NothingAhead {
  void ask(int64_t = 1) {}
  void ask_half(int64_t) {}
};

template <int R>
static inline void load_sums(const float* from, Vec (&sums)[R][kVecs]) {
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) sums[r][v] = from ? load(from + r * kBlockN + v * kLanes) : zero();
  }
}

template <int R>
static inline void store_sums(float* to, const Vec (&sums)[R][kVecs]) {
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) store(to + r * kBlockN + v * kLanes, sums[r][v]);
  }
}

// One unit in all lanes, and how it is multiplied.
static inline Vec spread(float unit) { return set(unit); }
#ifdef TR_BF16
struct PairVec {
  __m512i v;
};
static inline PairVec spread(uint32_t unit) { return {_mm512_set1_epi32(static_cast<int>(unit))}; }
static inline Vec fma(PairVec a, PairVec b, Vec c) { return {_mm512_dpbf16_ps(c.v, (__m512bh)a.v, (__m512bh)b.v)}; }
#endif

// sums += one unit of R rows x its weights, in vectors weight(v). No more than fit the registers are held at a time.
template <int R, class U, class Weight>
static inline void add_unit(const U* x, const Weight& weight, Vec (&sums)[R][kVecs]) {
  if constexpr (R < kVecs) {
    decltype(spread(*x)) inputs[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) inputs[r] = spread(x[r]);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      const auto w = weight(v);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[r][v] = fma(inputs[r], w, sums[r][v]);
    }
  } else {
    decltype(weight(0)) w[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) w[v] = weight(v);
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
      const auto input = spread(x[r]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) sums[r][v] = fma(input, w[v], sums[r][v]);
    }
  }
}

// sums += units of R rows, [unit][R], x as many of 32 outputs.

// [unit][32 outputs]
template <int R, class A>
[[gnu::always_inline]] static inline void add_units(const float* x, const float* weight, int64_t units, A ahead,
                                                    Vec (&sums)[R][kVecs]) {
  for (int64_t i = 0; i < units; ++i, x += R, weight += kBlockN) {
    ahead.ask();
    add_unit<R>(x, [&](int v) { return load(weight + v * kLanes); }, sums);
  }
}

// Where vector v of a pair's weights lies in a tile of a bf16 weight and the next one.
static inline const bf16* vector_of_pair(const bf16* pair, int v) {
  return pair + v * kLanes / 16 * kTile + v * kLanes % 16 * 2;
}

constexpr int64_t kUnitsOfPair = kPaired<bf16> ? 1 : 2;

// The weights of two inputs for kLanes outputs, in the form in which they are multiplied.
#ifdef TR_BF16
using Pair = PairVec;
static inline Pair load_pair(const bf16* p) { return {_mm512_loadu_si512(p)}; }
#else
using Pair = Two;
static inline Pair load_pair(const bf16* p) { return load_pairs(p); }
#endif

// sums[R], their vector v, += R rows x a pair.
template <int R>
[[gnu::always_inline]] static inline void add_pair(const Unit<bf16>* x, const Pair& pair, int v,
                                                   Vec (&sums)[R][kVecs]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#ifdef TR_BF16
    sums[r][v] = fma(spread(x[r]), pair, sums[r][v]);
#else
    sums[r][v] = fma(spread(x[R + r]), pair.b, fma(spread(x[r]), pair.a, sums[r][v]));
#endif
  }
}

// sums[R] from vector kFirst on += a tile of a bf16 weight with R rows.
template <int R, int kFirst, class A>
[[gnu::always_inline]] static inline void add_tile(const Unit<bf16>* x, const bf16* tile, int64_t pairs, A& ahead,
                                                   Vec (&sums)[R][kVecs]) {
  for (const bf16 *pair = tile, *end = tile + pairs * 32; pair != end; pair += 32, x += R * kUnitsOfPair) {
    ahead.ask_half(kUnitsOfPair);
#pragma GCC unroll 2
    for (int v = 0; v < kVecs / 2; ++v) add_pair<R>(x, load_pair(pair + v * kLanes * 2), kFirst + v, sums);
  }
}

// Two tiles of a bf16 weight after two others.
template <int R, class A>
[[gnu::always_inline]] static inline void add_units(const Unit<bf16>* x, const bf16* weight, int64_t units, A ahead,
                                                    Vec (&sums)[R][kVecs]) {
  constexpr int64_t kUnits = kUnitsOfPair;
  for (int64_t first = 0; first < units; first += 16 * kUnits, weight += 2 * kTile) {
    const int64_t pairs = std::min<int64_t>(16, (units - first) / kUnits);
    if constexpr (R <= kRowsInOrder) {
      add_tile<R, 0>(x, weight, pairs, ahead, sums);
      add_tile<R, kVecs / 2>(x, weight + kTile, pairs, ahead, sums);
      x += pairs * R * kUnits;
      continue;
    }
    const bf16* const end = weight + pairs * 32;
    for (const bf16* pair = weight; pair != end; pair += 32, x += R * kUnits) {
      ahead.ask(kUnits);
#ifdef TR_BF16
      add_unit<R>(x, [&](int v) { return PairVec{_mm512_loadu_si512(vector_of_pair(pair, v))}; }, sums);
#else
      add_unit<R>(x, [&](int v) { return load_pairs(vector_of_pair(pair, v)).a; }, sums);
      const bf16* again = pair;
      asm("" : "+r"(again));  // loaded again: there is no register to keep it
      add_unit<R>(x + R, [&](int v) { return load_pairs(vector_of_pair(again, v)).b; }, sums);
#endif
    }
  }
}

// The micro-kernel: sums[R][32] = or, to go on, += units of R rows x as many of 32 outputs.
// On its own: the loops of its callers would cost it registers.
template <int R, class U, class W>
[[gnu::noinline]] static void multiply_panel(const U* x, const W* weight, int64_t units, float* sums, bool go_on,
                                             Ahead ahead) {
  Vec s[R][kVecs];
  load_sums<R>(go_on ? sums : nullptr, s);
  add_units<R>(x, weight, units, ahead, s);
  store_sums<R>(sums, s);
}

// f(R) with R = rows, a constant, of 1 to most.
template <int most, class F>
static inline void for_rows(int64_t rows, const F& f) {
  if constexpr (most > 1) {
    if (rows < most) return for_rows<most - 1>(rows, f);
  }
  f(std::integral_constant<int, most>{});
}

// Rows as panels of about equal size, in memory that all threads share: parts of `part` units one after the other, of
// each the panels, of each the units.
template <class T>
class RowPanels {
 public:
  static size_t bytes(int64_t m, int64_t k) { return static_cast<size_t>(m * units_of<T>(k)) * sizeof(Unit<T>); }

  // Units beyond those of k are zero.
  RowPanels(void* memory, int64_t m, int64_t k, int64_t units = 0, int64_t part = kPart, int64_t most_rows = kPanelRows)
      : m(m),
        units(std::max(units, units_of<T>(k))),
        part(part),
        panels(blocks(m, most_rows)),
        k_(k),
        data_(static_cast<Unit<T>*>(memory)) {}

  // row(i) is where the inputs of row i are. By all threads together, a part each, or by one.
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

  // A panel's units from `unit` on, until the end of that part.
  const Unit<T>* at(int64_t panel, int64_t unit) const {
    const int64_t begin = unit / part * part, part_units = std::min(part, units - begin);
    return data_ + begin * m + first_row(panel) * part_units + (unit - begin) * rows(panel);
  }

  const int64_t m, units, part, panels;

 private:
  // Units that are packed at a time: a part, of one that holds all a piece.
  int64_t piece_units() const { return units <= part ? kPart : part; }
  int64_t pieces() const { return blocks(units, piece_units()) * panels; }

  template <class Row>
  void pack(const Row& row, Range own) const {
    for (int64_t piece = own.begin; piece < own.end; ++piece) pack(row, piece % panels, piece / panels * piece_units());
  }

  // Few units of one row after the other: rows often lie a power of two apart and would push each other out.
  template <class Row>
  void pack(const Row& row, int64_t panel, int64_t begin) const {
    constexpr int64_t kSome = 16, kInputs = kPaired<T> ? 2 : 1;
    const int64_t first = first_row(panel), count = rows(panel), end = std::min(begin + piece_units(), units);
    const auto inputs = [&](int64_t begin, int64_t end) { return std::clamp(k_, begin, end) - begin; };
    Unit<T>* to = const_cast<Unit<T>*>(at(panel, begin));
    if (count == 1) {
      const int64_t there = inputs(begin * kInputs, end * kInputs);
      std::fill(to + there / kInputs, to + end - begin, 0);
      return read_units(row(first) + begin * kInputs, there, to);
    }
    for (int64_t unit = begin; unit < end; unit += kSome, to += kSome * count) {
      alignas(64) Unit<T> from[kSome][kSome] = {};
      const int64_t there = inputs(unit * kInputs, (unit + kSome) * kInputs);
      for (int64_t r = 0; r < count; ++r) read_units(row(first + r) + unit * kInputs, there, from[r]);
      turn_over(from, count, std::min(kSome, end - unit), to);
    }
  }

  static void read_units(const T* inputs, int64_t count, Unit<T>* to) {
    if constexpr (kPaired<T>) {
      std::memcpy(to, inputs, static_cast<size_t>(count) * sizeof(T));
    } else {
      for_lanes(count, [&](int64_t i, auto lanes) { lanes.store(to + i, lanes.load(inputs + i)); });
    }
  }

  // to[unit][row] = from[row][unit]
  static void turn_over(const Unit<T> (&from)[16][16], int64_t rows, int64_t units, Unit<T>* to) {
#ifdef TR_AVX512
    __m512i lines[16], columns[16];
    for (int r = 0; r < 16; ++r) lines[r] = _mm512_load_si512(from[r]);
    transpose(lines, columns);
    for (int64_t i = 0; i < units; ++i) _mm512_mask_storeu_epi32(to + i * rows, first_lanes(rows), columns[i]);
#else
    for (int64_t i = 0; i < units; ++i) {
      for (int64_t r = 0; r < rows; ++r) to[i * rows + r] = from[r][i];
    }
#endif
  }

  const int64_t k_;
  Unit<T>* const data_;
};

}  // namespace tilerank::TR_RUNG
