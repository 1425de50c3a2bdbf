// The scales with which rows are quantised to int4 and fp8, compiled once per rung (no include guard).

namespace tilerank::TR_RUNG {

// How a K-block is quantised: value = (code - zero) * scale.
struct Int4Params {
  float scale;
  int zero;
};

// Adds up in one order on every rung, so that all choose the same scales: kPartialSums sums of every 16th number, then
// their halves.
constexpr int64_t kPartialSums = 16;

class OrderedSum {
 public:
  OrderedSum() { std::fill_n(parts_, kVectors, zero()); }

  // Adds kLanes numbers to the sums of part `part`.
  void add(int64_t part, Vec x) { parts_[part] = parts_[part] + x; }

  float total() const {
    float sums[kPartialSums];
    for (int64_t part = 0; part < kVectors; ++part) store(sums + part * kLanes, parts_[part]);
    for (int64_t half = kPartialSums / 2; half > 0; half /= 2) {
      for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
    }
    return sums[0];
  }

  static constexpr int64_t kVectors = kPartialSums / kLanes;

 private:
  Vec parts_[kVectors];
};

// Searches the scale (and zero) of a group with the least sum of w (x - scale * l)^2, where w = importance, or |x|, and
// l = the integer nearest to x * inverse in [low, high]. For given l the best scale is sum(w x l) / sum(w l^2), and the
// error is least where sum(w x l)^2 / sum(w l^2) is largest. Numbers are divided by the largest magnitude first, so
// that no power of them overflows.
class Int4Search {
 public:
  // values[count] finite, `largest` their largest magnitude, importance[count] or null, count a multiple of
  // kPartialSums. memory: 3 * count floats.
  Int4Search(const float* values, const float* importance, int64_t count, float largest, float* memory)
      : count_(count), x_(memory), weights_(memory + count), weighted_(memory + 2 * count) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const Vec x = load(values + i) / set(largest);
      const Vec weight = importance ? load(importance + i) : max(x, tilerank::TR_RUNG::zero() - x);
      store(x_ + i, x);
      store(weights_ + i, weight);
      store(weighted_ + i, weight * x);
    }
  }

  void attempt(float inverse, int zero) {
    const Vec low = set(static_cast<float>(-zero)), high = set(static_cast<float>(15 - zero));
    OrderedSum xl, ll;
    for (int64_t i = 0; i < count_; i += kPartialSums) {
      for (int64_t part = 0; part < OrderedSum::kVectors; ++part) {
        const int64_t at = i + part * kLanes;
        const Vec l = min(max(round_to_int(load(x_ + at) * set(inverse)), low), high);
        xl.add(part, load(weighted_ + at) * l);
        ll.add(part, load(weights_ + at) * (l * l));
      }
    }
    const float products = xl.total(), squares = ll.total();
    if (squares > 0 && products * products > gain_ * squares) {
      gain_ = products * products / squares;
      best = {products / squares, zero};
    }
  }

  Int4Params best{0.0f, 8};  // of the numbers divided by the largest

 private:
  const int64_t count_;
  float* const x_;
  float* const weights_;
  float* const weighted_;  // weight * x
  float gain_ = 0;
};

// The least and the largest of values and 0, and their largest magnitude, if all are finite.
struct Extremes {
  float least = 0, most = 0, largest = 0;
  bool finite = true;

  // count: a multiple of kPartialSums.
  Extremes(const float* values, int64_t count) {
    Vec low = zero(), high = zero(), wrong = zero();
    for (int64_t i = 0; i < count; i += kLanes) {
      const Vec x = load(values + i);
      low = max(low, zero() - x);
      high = max(high, x);
      wrong = wrong + (x - x);  // NaN, if x is infinite or NaN
    }
    finite = !std::isnan(sum(wrong));
    if (!finite) return;
    least = -max_of(low);
    most = max_of(high);
    largest = std::max(-least, most);
  }

  // Too small to divide by; then all become zeros.
  bool are_tiny() const { return largest < 1e-30f; }
};

// The scale and zero of values[count]. importance[count]: weights of the errors, or null. memory: 3 * count floats.
static Int4Params choose_int4(const float* values, const float* importance, int64_t count, bool zeros, float* memory) {
  const Extremes extremes(values, count);
  if (!extremes.finite) return {std::numeric_limits<float>::quiet_NaN(), 8};
  if (extremes.are_tiny()) return {0.0f, 8};
  const auto [least, most, largest, finite] = extremes;
  Int4Search search(values, importance, count, largest, memory);
  const float first = least / largest, range = most / largest - first;
  for (int step = -3; step <= 5; ++step) {
    if (zeros) {
      const float extra = static_cast<float>(step) / 2, inverse = (15 + extra) / range;
      const float zero = -first * inverse - extra / 2;  // clips equally at both ends
      search.attempt(inverse, std::clamp(static_cast<int>(std::lrint(zero)), 0, 15));
    } else {
      const float inverse = 8 + static_cast<float>(step) / 4;  // the extreme value, 1 or -1, becomes -8
      search.attempt(-least > most ? inverse : -inverse, 8);
    }
  }
  return {search.best.scale * largest, search.best.zero};
}

// Returns the factor, of 448 / (1 + i / 16), with the least squared error of values times factor as fp8.
// relative[count]: values by the largest magnitude; importance[count]: weights of the errors; count a multiple of
// kPartialSums. Codes below 2^-6 count as if they had all bits.
static float choose_fp8(const float* relative, const float* importance, int64_t count) {
  float best = 448, least = std::numeric_limits<float>::infinity();
  for (int step = 0; step < 16; ++step) {
    const float wider = 1 + static_cast<float>(step) / 16, factor = 448 / wider;
    OrderedSum sum;
    for (int64_t i = 0; i < count; i += kPartialSums) {
      for (int64_t part = 0; part < OrderedSum::kVectors; ++part) {
        // Veltkamp: of 24 bits, the upper 4 remain.
        const int64_t at = i + part * kLanes;
        const Vec x = load(relative + at) * set(factor), split = x * set(1048577.0f);
        const Vec error = (split - (split - x)) - x;
        sum.add(part, load(importance + at) * (error * error));
      }
    }
    const float error = sum.total() * (wider * wider);
    if (error < least) least = error, best = factor;
  }
  return best;
}

}  // namespace tilerank::TR_RUNG
