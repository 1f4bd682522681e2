// The one loop in which nearly all time is spent: a few rows times a panel of 64 columns.
//
//                       B: packed panel, [pairs][64 columns] of (b[2k][n], b[2k+1][n])
//                       +------+------+------+------+
//                    k  | 16   | 16   | 16   | 16   |   4 loads, each used by all rows
//                       +------+------+------+------+
//   A: [rows][2 pairs]  +------+------+------+------+
//   (a[m][2k],      --> | acc  | acc  | acc  | acc  |   each A pair is broadcast to all lanes and used 4 times
//    a[m][2k+1])        | ...  up to 6 rows         |
//                       +------+------+------+------+   C: [rows][64] float32
//
// Six rows: 6 x 4 sums + 4 of B + 1 of A are 29 of the 32 vector registers, and 24 sums in flight hide the six cycles
// that a dot product takes. Every sum runs over k in order, whatever the number of rows: a row's result does not
// depend on which other rows share its batch.
#pragma once

#include <algorithm>

#include "simd.h"

namespace pdserve {

constexpr int kTileRows = 6;

// What lies at one k of a packed panel: a pair of each of the 64 columns.
struct Bf16Row {
  bf16 numbers[2 * kPanel];
};

inline const Bf16Row* as_rows(const bf16* packed) { return reinterpret_cast<const Bf16Row*>(packed); }

inline void load_columns(const Bf16Row* rows, int64_t k, __m512bh column[4]) {
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    column[j] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(rows[k].numbers + j * 2 * kLanes));
  }
}

struct Matrix {
  const bf16* data;
  int64_t stride;  // numbers from one row to the next
};

struct Sums {
  float* data;
  int64_t stride;
};

enum class Start { kZero, kAdd };

// LinesAhead: how many cache lines to send for with each pair, from `ahead` on, into the second-level cache.
template <int Rows, Start start, int LinesAhead, class Panel>
void multiply_tile(Matrix a, Panel b, int64_t pairs, Sums c, const char* ahead) {
  __m512 sum[Rows][4];
#pragma GCC unroll 6
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      sum[row][j] = start == Start::kZero ? _mm512_setzero_ps() : _mm512_loadu_ps(c.data + row * c.stride + j * kLanes);
    }
  }
  for (int64_t k = 0; k < pairs; ++k) {
    __m512bh column[4];
    load_columns(b, k, column);
#pragma GCC unroll 4
    for (int line = 0; line < LinesAhead; ++line) {
      _mm_prefetch(ahead + (k * LinesAhead + line) * kLineBytes, _MM_HINT_T1);
    }
#pragma GCC unroll 6
    for (int row = 0; row < Rows; ++row) {
      int32_t bits;
      __builtin_memcpy(&bits, a.data + row * a.stride + 2 * k, sizeof bits);
      const auto pair = reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) sum[row][j] = _mm512_dpbf16_ps(sum[row][j], pair, column[j]);
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) _mm512_storeu_ps(c.data + row * c.stride + j * kLanes, sum[row][j]);
  }
}

// rows <= 6. b: anything that load_columns takes.
template <Start start, int LinesAhead = 0, class Panel>
void multiply_rows(int rows, Matrix a, Panel b, int64_t pairs, Sums c, const char* ahead = nullptr) {
  switch (rows) {
    case 1: return multiply_tile<1, start, LinesAhead>(a, b, pairs, c, ahead);
    case 2: return multiply_tile<2, start, LinesAhead>(a, b, pairs, c, ahead);
    case 3: return multiply_tile<3, start, LinesAhead>(a, b, pairs, c, ahead);
    case 4: return multiply_tile<4, start, LinesAhead>(a, b, pairs, c, ahead);
    case 5: return multiply_tile<5, start, LinesAhead>(a, b, pairs, c, ahead);
    case 6: return multiply_tile<6, start, LinesAhead>(a, b, pairs, c, ahead);
  }
}

// Cuts rows into tiles of at most six that differ by at most one: 32 rows are 6 6 5 5 5 5, never 6 6 6 6 6 2, as small
// tiles leave the multipliers idle.
struct RowTiles {
  int64_t rows;
  int64_t count = (rows + kTileRows - 1) / kTileRows;
  int64_t begin(int64_t tile) const { return tile * rows / count; }
  int size(int64_t tile) const { return static_cast<int>(begin(tile + 1) - begin(tile)); }
};

}  // namespace pdserve
