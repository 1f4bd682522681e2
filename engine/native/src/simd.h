// What the kernels share: bf16 <-> float, exp2, and the two shuffles that bring data into dot-product order.
//
// vdpbf16ps takes bf16 numbers two by two: lane i of the result grows by a[2i] * b[2i] + a[2i+1] * b[2i+1], in
// float32. So a matrix product wants, next to each other in memory, the two numbers that are summed; a "pair" below is
// such a couple, 32 bits, and a vector holds 16 of them.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstdint>

namespace pdserve {

using bf16 = uint16_t;

constexpr int kLanes = 16;    // float32 numbers, or bf16 pairs, in a vector
constexpr int kPanel = 64;    // columns of a matrix product that are computed together: four vectors
constexpr int64_t kLineBytes = 64;  // of the caches
constexpr float kLog2E = 1.44269504088896341f;

inline __m512 to_float(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

inline float to_float(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

// Rounds to nearest even.
inline __m256i to_bf16(__m512 x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }

// The first `count` lanes, count <= 16; none when it is negative.
inline __mmask16 first_lanes(int64_t count) {
  if (count <= 0) return 0;
  return count >= kLanes ? 0xffff : static_cast<__mmask16>((1u << count) - 1);
}

inline __m512 load_float(const bf16* from, __mmask16 lanes = 0xffff) {
  return to_float(_mm256_maskz_loadu_epi16(lanes, from));
}

inline void store_bf16(bf16* to, __m512 x, __mmask16 lanes = 0xffff) {
  _mm256_mask_storeu_epi16(to, lanes, to_bf16(x));
}

// 2^x with a relative error below 3e-6, far under bf16's 2e-3: 2^n times a polynomial (a least-squares fit on
// [-1/2, 1/2]). x must be finite; however far below zero, it gives 0.
inline __m512 exp2(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(0.009560510516166687f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.05591703951358795f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.24024981260299683f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6931219696998596f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.9999991655349731f));
  return _mm512_scalef_ps(p, n);
}

// x / (1 + e^-x). Where e^-x overflows to infinity the result is -0, as it should be.
inline __m512 silu(__m512 x) {
  const __m512 e = exp2(_mm512_mul_ps(x, _mm512_set1_ps(-kLog2E)));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

// Rows of 16 pairs become columns: pair j of row i goes to pair i of row j.
inline void transpose_pairs(__m512i row[kLanes]) {
  __m512i t[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; i += 2) {
    t[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4) {
    row[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    row[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    row[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    row[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // Now row[4q + c] holds, in its 128-bit quarter s, column 4s + c of rows 4q .. 4q+3: gather the four q of each.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i even_low = _mm512_shuffle_i32x4(row[c], row[4 + c], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(row[c], row[4 + c], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(row[8 + c], row[12 + c], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(row[8 + c], row[12 + c], 0xdd);
    t[c] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    t[4 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    t[12 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) row[i] = t[i];
}

// Two rows of 32 bf16 numbers become 32 pairs, (first[i], second[i]).
struct Interleaved {
  __m512i low, high;
};

inline Interleaved interleave(__m512i first, __m512i second) {
  alignas(64) static constexpr struct Order {
    uint16_t low[32], high[32];
    constexpr Order() : low(), high() {
      for (uint16_t i = 0; i < 16; ++i) {
        low[2 * i] = i;
        low[2 * i + 1] = 32 + i;
        high[2 * i] = 16 + i;
        high[2 * i + 1] = 48 + i;
      }
    }
  } order;
  return {_mm512_permutex2var_epi16(first, _mm512_load_si512(order.low), second),
          _mm512_permutex2var_epi16(first, _mm512_load_si512(order.high), second)};
}

}  // namespace pdserve
