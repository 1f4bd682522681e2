// The weight W [n, k] of a linear layer as linear.h reads it: [panels][k / 2] rows of 64 pairs, a column being a row of
// W. Columns past n are zero. For SwiGLU a panel is 32 columns of the gate and the same 32 of the up projection, so that
// both halves of silu(gate) * up meet in one tile: 0..31 gate, 32..63 up.
#pragma once

#include "int8_row.h"
#include "thread_pool.h"

namespace pdserve {

struct Weight {
  const bf16* data;  // [n, k]
  int64_t n, k;
  bool is_swiglu;
};

inline int64_t num_panels(int64_t n) { return (n + kPanel - 1) / kPanel; }

// The row of W behind a column of a panel, or null for padding.
inline const bf16* source_row(const Weight& weight, int64_t panel, int column) {
  const int64_t half = kPanel / 2;
  int64_t row = panel * kPanel + column, end = weight.n;
  if (weight.is_swiglu) {
    row = panel * half + column % half + (column < half ? 0 : weight.n / 2);
    if (column < half) end = weight.n / 2;
  }
  return row < end ? weight.data + row * weight.k : nullptr;
}

// work(panel, column, row of W or null)
template <class Work>
void for_each_column(ThreadPool& pool, const Weight& weight, const Work& work) {
  pool.for_each(num_panels(weight.n), [&](int64_t panel, int) {
    for (int column = 0; column < kPanel; ++column) work(panel, column, source_row(weight, panel, column));
  });
}

inline void pack_weight(ThreadPool& pool, const Weight& weight, Bf16Row* packed) {
  const int64_t pairs = weight.k / 2;
  for_each_column(pool, weight, [&](int64_t panel, int column, const bf16* row) {
    for (int64_t pair = 0; pair < pairs; ++pair) {
      bf16* to = packed[panel * pairs + pair].numbers + 2 * column;
      for (int i = 0; i < 2; ++i) to[i] = row ? row[2 * pair + i] : 0;
    }
  });
}

// scales [panels * 64], in the order of the panels' columns.
inline void pack_weight(ThreadPool& pool, const Weight& weight, Int8Row* packed, float* scales) {
  const int64_t pairs = weight.k / 2;
  for_each_column(pool, weight, [&](int64_t panel, int column, const bf16* row) {
    const float scale = row ? scale_of(row, weight.k) : 0.0f;
    scales[panel * kPanel + column] = scale;
    for (int64_t pair = 0; pair < pairs; ++pair) {
      uint8_t* to = packed[panel * pairs + pair].codes + code_position(column);
      for (int i = 0; i < 2; ++i) to[i] = row ? code_of(row[2 * pair + i], scale) : 0;
    }
  });
}

}  // namespace pdserve
