// The blocks of GGUF files as they are stored, compiled once per rung (no include guard).

namespace tilerank::TR_RUNG {

// A block of 32 or 256 values. Scale and minimum are bits of f16; subtrahends of the files are minimums here, with the
// other sign.
struct FileBlock {
  uint8_t codes[256];
  uint16_t scale, minimum;
  int8_t subscales[16], subminimums[16];  // of groups of 16 or 32 values
};

static inline uint16_t half_at(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return bits;
}

// to = codes of 4 bits: of every kRun bytes the lower ones, then the upper ones.
template <int kBytes, int kRun, class T>
static inline void put_nibbles(const uint8_t* packed, T* to) {
  for (int first = 0; first < kBytes; first += kRun, to += 2 * kRun) {
    for (int i = 0; i < kRun; ++i) {
      to[i] = packed[first + i] & 15;
      to[kRun + i] = packed[first + i] >> 4;
    }
  }
}

// to += codes of 1 or 2 bits, times 2^kShift: of every kRun bytes the lowest bits, then those above them.
template <int kBytes, int kRun, int kBits, int kShift, class T>
static inline void add_planes(const uint8_t* packed, T* to) {
  for (int first = 0; first < kBytes; first += kRun) {
    for (int place = 0; place < 8; place += kBits, to += kRun) {
      for (int i = 0; i < kRun; ++i) to[i] += (packed[first + i] >> place & ((1 << kBits) - 1)) << kShift;
    }
  }
}

// Subscales and subminimums of Q4_K and Q5_K.
static inline void put_factors_of_6_bits(const uint8_t* packed, FileBlock& to) {
  for (int i = 0; i < 4; ++i) {
    const int first = packed[i], second = packed[4 + i], third = packed[8 + i];
    to.subscales[i] = static_cast<int8_t>(first & 63);
    to.subscales[4 + i] = static_cast<int8_t>((third & 15) | (first >> 6) << 4);
    to.subminimums[i] = static_cast<int8_t>(second & 63);
    to.subminimums[4 + i] = static_cast<int8_t>(third >> 4 | (second >> 6) << 4);
  }
}

// Reads a block of a type by its number in files. What the type does not have is not written.
static inline void read_block(int64_t type, const uint8_t* from, FileBlock& to) {
  constexpr uint16_t kSign = 0x8000;
  to.scale = half_at(from);
  switch (type) {
    case 2:   // Q4_0
    case 20:  // IQ4_NL
      return put_nibbles<16, 16>(from + 2, to.codes);
    case 3:  // Q4_1
      to.minimum = half_at(from + 2);
      return put_nibbles<16, 16>(from + 4, to.codes);
    case 6:  // Q5_0
    case 7:  // Q5_1
      if (type == 7) to.minimum = half_at(from + 2), from += 2;
      put_nibbles<16, 16>(from + 6, to.codes);
      for (int i = 0; i < 32; ++i) to.codes[i] += (from[2 + i / 8] >> i % 8 & 1) << 4;
      return;
    case 8:  // Q8_0
      std::memcpy(to.codes, from + 2, 32);
      return;
    case 10:  // Q2_K
      to.scale = half_at(from + 80);
      to.minimum = half_at(from + 82) ^ kSign;
      for (int i = 0; i < 16; ++i) {
        to.subscales[i] = static_cast<int8_t>(from[i] & 15);
        to.subminimums[i] = static_cast<int8_t>(from[i] >> 4);
      }
      std::memset(to.codes, 0, sizeof(to.codes));
      return add_planes<64, 32, 2, 0>(from + 16, to.codes);
    case 11:  // Q3_K
      to.scale = half_at(from + 108);
      put_nibbles<8, 8>(from + 96, to.subscales);
      add_planes<4, 4, 2, 4>(from + 104, to.subscales);
      for (int8_t& subscale : to.subscales) subscale -= 32;
      std::memset(to.codes, 0, sizeof(to.codes));
      add_planes<64, 32, 2, 0>(from + 32, to.codes);
      return add_planes<32, 32, 1, 2>(from, to.codes);
    case 12:  // Q4_K
      to.minimum = half_at(from + 2) ^ kSign;
      put_factors_of_6_bits(from + 4, to);
      return put_nibbles<128, 32>(from + 16, to.codes);
    case 13:  // Q5_K
      to.minimum = half_at(from + 2) ^ kSign;
      put_factors_of_6_bits(from + 4, to);
      put_nibbles<128, 32>(from + 48, to.codes);
      return add_planes<32, 32, 1, 4>(from + 16, to.codes);
    case 14:  // Q6_K
      to.scale = half_at(from + 208);
      std::memcpy(to.subscales, from + 192, 16);
      put_nibbles<128, 64>(from, to.codes);
      return add_planes<64, 32, 2, 4>(from + 128, to.codes);
    case 23:  // IQ4_XS
      for (int i = 0; i < 8; ++i) {
        const int low = from[4 + i / 2] >> i % 2 * 4 & 15, high = half_at(from + 2) >> 2 * i & 3;
        to.subscales[i] = static_cast<int8_t>((low | high << 4) - 32);
      }
      return put_nibbles<128, 16>(from + 8, to.codes);
    default:
      throw Error("pack_gguf: type: expected one that has codes and scales, found " + std::to_string(type));
  }
}

}  // namespace tilerank::TR_RUNG
