// The scales and minimums of the block formats of GGUF (gguf.h), compiled once per rung (no include guard; include
// after blocks-inl.h).

namespace tilerank::TR_RUNG {

// kLanes unsigned bytes or halves in words.
static inline Ints widen_bytes(const void* p) {
#ifdef TR_AVX512
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#else
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
#endif
}
static inline Ints widen_halves(const void* p) {
#ifdef TR_AVX512
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
#else
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#endif
}

// Scales of one or two levels, and minimums, of the groups of inputs. kNibbles: subscales and subminimums share a byte.
template <bool kNibbles>
struct GgufFactors {
  const int64_t groups, first, kinds, subkinds;  // of a row; kinds: 2 with minimums
  const int64_t scale_step, subscale_step;       // from 32 outputs to the next
  const int shift;
  const f16* const scales;
  const int8_t* const subscales;

  explicit GgufFactors(const GgufWeight& w)
      : groups(w.values.size[1]),
        first(w.first()),
        kinds(w.scales.size[2]),
        subkinds(w.subscales ? w.subscales.size[2] : 0),
        scale_step(w.scales.stride[0]),
        subscale_step(w.subscales ? w.subscales.stride[0] : 0),
        shift(w.shift()),
        scales(w.scales.as<const f16>()),
        subscales(w.subscales ? w.subscales.as<const int8_t>() : nullptr) {}

  // The scales of outputs v * kLanes to v * kLanes + kLanes - 1 of a block.
  Vec scale(int64_t block, int64_t group, int64_t v) const {
    const Vec scale = load(scales + place(block, group) + v * kLanes);
    if (!subscales) return scale;
    const int8_t* const at = subscales + subplace(block, group) + v * kLanes;
    if constexpr (kNibbles) return scale * to_vec(both(widen_bytes(at), words(15)));
    return scale * load(at);
  }

  bool has_minimums() const { return kinds == 2; }
  Vec minimum(int64_t block, int64_t group, int64_t v) const {
    const Vec minimum = load(scales + place(block, group) + kBlockN + v * kLanes);
    if (!subscales) return minimum;
    const int8_t* const at = subscales + subplace(block, group) + v * kLanes;
    if constexpr (kNibbles) return minimum * to_vec(shift_down<4>(widen_bytes(at)));
    return minimum * load(at + kBlockN);
  }

  // Prefetches what scale() and minimum() read of a group, which may be one of the next block.
  void fetch_scales(int64_t block, int64_t group) const {
    if (group >= groups) ++block, group = std::min(group - groups, groups - 1);
    const f16* const scale = scales + place(block, group);
    _mm_prefetch(reinterpret_cast<const char*>(scale), _MM_HINT_T1);
    if (kinds == 2) _mm_prefetch(reinterpret_cast<const char*>(scale + kBlockN), _MM_HINT_T1);
    if (subscales) _mm_prefetch(reinterpret_cast<const char*>(subscales + subplace(block, group)), _MM_HINT_T1);
  }

 private:
  int64_t place(int64_t block, int64_t group) const {
    return block * scale_step + ((first + group) >> shift) * kinds * kBlockN;
  }
  int64_t subplace(int64_t block, int64_t group) const {
    return block * subscale_step + (first + group) * subkinds * kBlockN;
  }
};

}  // namespace tilerank::TR_RUNG
