// The softmax of attention, taken tile by tile (FlashAttention, Dao et al. 2022; the lazy rescaling is that of its
// fourth version).
#pragma once

#include <cmath>

#include "kv_tile.h"

namespace pdserve {

constexpr int64_t kQueryRows = 192;

// A score that is hidden, and the reference before there is one. Finite, as infinity less infinity is not a number; and
// hidden ones are far below any reference.
constexpr float kHidden = -2e38f, kNoneYet = -1e38f;

// Weights are 2^(score - reference). The reference need not be the highest score, only near it: it is raised, and what
// has been gathered scaled down, when weights would pass 2^8. After the first tile that is rare.
constexpr float kHeadroom = 8.0f;

// What rows have gathered so far: out = sum of weight * v, and total = sum of weight in 16 parts.
struct Progress {
  alignas(64) float out[kQueryRows * kMaxHeadDim];  // [rows][stride]
  alignas(64) float total[kQueryRows * kLanes];
  float reference[kQueryRows];

  void clear(int64_t rows, int64_t stride) {
    std::fill_n(out, rows * stride, 0.0f);
    std::fill_n(total, rows * kLanes, 0.0f);
    std::fill_n(reference, rows, kNoneYet);
  }
};

struct Row {
  float* out;
  float* total;
  float* reference;
  int64_t stride;
};

inline Row row_of(Progress& progress, int64_t row, int64_t stride) {
  return {progress.out + row * stride, progress.total + row * kLanes, progress.reference + row, stride};
}

// Which tokens of a tile a query position sees: [begin, end), counted within the tile.
struct Visible {
  int64_t begin, end;
};

inline float sum(const float lanes[kLanes]) { return _mm512_reduce_add_ps(_mm512_loadu_ps(lanes)); }

inline void multiply(float* data, int64_t size, __m512 factor) {
  for (int64_t i = 0; i < size; i += kLanes) _mm512_store_ps(data + i, _mm512_mul_ps(_mm512_load_ps(data + i), factor));
}

inline void raise_reference(const __m512 score[4], float scale, const Row& row) {
  const __m512 highest = _mm512_max_ps(_mm512_max_ps(score[0], score[1]), _mm512_max_ps(score[2], score[3]));
  const float now = _mm512_reduce_max_ps(highest);
  const __m512 shrink = _mm512_set1_ps(std::exp2((*row.reference - now) * scale));
  *row.reference = now;
  multiply(row.total, kLanes, shrink);
  multiply(row.out, row.stride, shrink);
}

// 64 scores become weights. scale: of a score, in powers of two.
inline void softmax_row(const float* scores, Visible tokens, float scale, const Row& row, bf16* weights) {
  __m512 score[4];
  __mmask16 is_high = 0;
  const __m512 limit = _mm512_set1_ps(*row.reference + kHeadroom / scale);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __mmask16 seen = first_lanes(tokens.end - j * kLanes) & ~first_lanes(tokens.begin - j * kLanes);
    score[j] = _mm512_mask_loadu_ps(_mm512_set1_ps(kHidden), seen, scores + j * kLanes);
    is_high |= _mm512_cmp_ps_mask(score[j], limit, _CMP_GT_OQ);
  }
  if (is_high) raise_reference(score, scale, row);
  const __m512 offset = _mm512_set1_ps(-*row.reference * scale);
  __m512 total = _mm512_load_ps(row.total);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512 weight = exp2(_mm512_fmadd_ps(score[j], _mm512_set1_ps(scale), offset));
    total = _mm512_add_ps(total, weight);
    store_bf16(weights + j * kLanes, weight);
  }
  _mm512_store_ps(row.total, total);
}

}  // namespace pdserve
