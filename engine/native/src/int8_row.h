// Weights as int8 codes, half the bytes of bf16: a number is code * scale, and each column has its scale.
//
// Codes are whole numbers up to 127, which bf16 holds exactly. So they are widened to bf16 in registers, multiplied like
// any other weight, and the sum is scaled at the end. Bits of bf16 numbers are looked up by magnitude, low and high byte
// apart; a lookup (AVX512-VBMI) does 64 codes at once:
//
//   code  s mmmmmmm  ->  high byte  s eeeeeee   low byte  e ffffff0
#pragma once

#include <algorithm>
#include <cmath>

#include "tile.h"

namespace pdserve {

constexpr int kLargestCode = 127;

// 64 pairs of codes, one of each column: sign in the top bit, magnitude below it. See code_position for their order.
struct Int8Row {
  uint8_t codes[2 * kPanel];
};

namespace int8_detail {

struct Tables {
  uint8_t low[kLargestCode + 1], high[kLargestCode + 1];
  constexpr Tables() : low(), high() {
    for (int magnitude = 1; magnitude <= kLargestCode; ++magnitude) {
      int exponent = 0;
      while (magnitude >> (exponent + 1)) ++exponent;
      const int bits = (127 + exponent) << 7 | (magnitude << (7 - exponent) & 0x7f);
      low[magnitude] = static_cast<uint8_t>(bits);
      high[magnitude] = static_cast<uint8_t>(bits >> 8);
    }
  }
};
alignas(64) inline constexpr Tables kTables;

// The lookup ignores the top bit of an index.
inline __m512i look_up(const uint8_t table[kLargestCode + 1], __m512i codes) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
}

}  // namespace int8_detail

// Where a column's pair is in its row. Low and high bytes are brought together within quarters of a vector, of 8 pairs
// each, the first 4 to one vector and the last 4 to another: so those are pairs of two vectors.
constexpr int code_position(int column) {
  const int vectors = column / (2 * kLanes), second = column / kLanes % 2, quarter = column % kLanes / 4;
  return (vectors * 2 * kLanes + quarter * 8 + second * 4 + column % 4) * 2;
}

inline void load_columns(const Int8Row* rows, int64_t k, __m512bh column[4]) {
  using namespace int8_detail;
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    constexpr int kFirstOrBoth = 0xf8;  // a | b & c
    const __m512i codes = _mm512_loadu_si512(rows[k].codes + i * 64);
    const __m512i low = look_up(kTables.low, codes);
    const __m512i high = _mm512_ternarylogic_epi32(look_up(kTables.high, codes), codes,
                                                   _mm512_set1_epi8(static_cast<char>(0x80)), kFirstOrBoth);
    column[2 * i] = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi8(low, high));
    column[2 * i + 1] = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi8(low, high));
  }
}

// The same, and keeps what it has widened for whoever else needs it.
struct Widening {
  const Int8Row* from;
  Bf16Row* to;
};

inline void load_columns(Widening rows, int64_t k, __m512bh column[4]) {
  load_columns(rows.from, k, column);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    _mm512_store_si512(rows.to[k].numbers + j * 2 * kLanes, reinterpret_cast<__m512i>(column[j]));
  }
}

// Of a column, so that its largest number gets the largest code. 0 if all are zero.
inline float scale_of(const bf16* numbers, int64_t count) {
  float largest = 0.0f;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(to_float(numbers[i])));
  return largest / kLargestCode;
}

inline uint8_t code_of(bf16 number, float scale) {
  if (scale == 0.0f) return 0;
  const float code = std::nearbyint(to_float(number) / scale);  // ties to even
  const auto magnitude = static_cast<uint8_t>(std::min<float>(std::fabs(code), kLargestCode));
  return code < 0 ? magnitude | 0x80 : magnitude;
}

}  // namespace pdserve
