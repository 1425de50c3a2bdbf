// The places of codes in the planes of a tile (gguf.h), compiled once per rung (no include guard).

namespace tilerank::TR_RUNG {

// Calls f(planes) for the planes of so many bits.
template <class F>
static void for_planes(int64_t bits, const F& f) {
  switch (bits) {
    case 2:
      return f(CodePlanes<2>());
    case 3:
      return f(CodePlanes<3>());
    case 4:
      return f(CodePlanes<4>());
    case 5:
      return f(CodePlanes<5>());
    default:
      return f(CodePlanes<6>());
  }
}

// The half of a tile that has output n and the inputs from k on.
template <class Planes>
static inline uint8_t* tile_of(const Tensor& values, int64_t n, int64_t k) {
  return values.row<uint8_t>(n / kBlockN) + (k / Planes::kInputs * 2 + n % kBlockN / kHalfN) * Planes::kBytes;
}

}  // namespace tilerank::TR_RUNG
