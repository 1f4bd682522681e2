// y = x · Wᵀ with W packed once, and what is done to each result before it is stored.
#pragma once

#include <algorithm>
#include <cstring>

#include "thread_pool.h"
#include "tile.h"

namespace pdserve {

enum class Output : int { kBf16 = 0, kFloat = 1, kSwiGLU = 2 };

// W is [n, k] row by row; packed it is [panels][k / 2][64 columns] pairs, a column being a row of W. Columns past n are
// zero. For SwiGLU a panel is 32 columns of the gate and the same 32 of the up projection, so that both halves of
// silu(gate) * up meet in one tile: 0..31 gate, 32..63 up.
inline int64_t num_panels(int64_t n) { return (n + kPanel - 1) / kPanel; }

// The row of W behind a column of a panel, or -1 for padding.
inline int64_t source_row(int64_t panel, int column, int64_t n, bool is_swiglu) {
  if (!is_swiglu) {
    const int64_t row = panel * kPanel + column;
    return row < n ? row : -1;
  }
  const int64_t half = kPanel / 2, row = panel * half + column % half;
  return row < n / 2 ? row + (column < half ? 0 : n / 2) : -1;
}

inline void pack_weight(ThreadPool& pool, const bf16* weight, int64_t n, int64_t k, bool is_swiglu, bf16* packed) {
  const int64_t pairs = k / 2;
  pool.for_each(num_panels(n), [&](int64_t panel, int) {
    bf16* to = packed + panel * pairs * kPanel * 2;
    for (int column = 0; column < kPanel; ++column) {
      const int64_t row = source_row(panel, column, n, is_swiglu);
      for (int64_t pair = 0; pair < pairs; ++pair) {
        bf16* at = to + (pair * kPanel + column) * 2;
        if (row < 0) {
          std::memset(at, 0, 4);
        } else {
          std::memcpy(at, weight + row * k + 2 * pair, 4);
        }
      }
    }
  });
}

struct Linear {
  const bf16* x;  // [m, k]
  const bf16* packed;
  const float* bias;     // [panels * 64] in the packed order, or null
  const bf16* residual;  // [m, columns], added to the result, and may be y itself; or null
  void* y;  // [m, columns] bf16, or float32 for Output::kFloat
  int64_t m, columns, k;  // columns of y: for SwiGLU half the rows of W
  Output output;
};

// A layer as a step uses it.
inline Linear applied(Linear linear, const bf16* x, const bf16* residual, void* y, int64_t m) {
  linear.x = x;
  linear.residual = residual;
  linear.y = y;
  linear.m = m;
  return linear;
}

namespace linear_detail {

// Rows whose x stays in the second-level cache while the panels pass by.
constexpr int64_t kBlockRows = 32 * kTileRows;
// Pairs of a panel that stay there: 256 KB. Longer sums are put down and taken up again.
constexpr int64_t kBlockPairs = 1024;

struct TileOfOutput {
  int64_t row, panel;
  int rows;
};

inline void store_plain(const Linear& op, const TileOfOutput& tile, Sums sums) {
  for (int i = 0; i < tile.rows; ++i) {
    const int64_t row = tile.row + i;
    for (int j = 0; j < kPanel; j += kLanes) {
      const int64_t column = tile.panel * kPanel + j;
      const __mmask16 lanes = first_lanes(op.columns - column);
      if (!lanes) break;
      __m512 y = _mm512_loadu_ps(sums.data + i * sums.stride + j);
      if (op.bias) y = _mm512_add_ps(y, _mm512_loadu_ps(op.bias + column));
      if (op.residual) y = _mm512_add_ps(y, load_float(op.residual + row * op.columns + column, lanes));
      if (op.output == Output::kFloat) {
        _mm512_mask_storeu_ps(static_cast<float*>(op.y) + row * op.columns + column, lanes, y);
      } else {
        store_bf16(static_cast<bf16*>(op.y) + row * op.columns + column, y, lanes);
      }
    }
  }
}

inline void store_swiglu(const Linear& op, const TileOfOutput& tile, Sums sums) {
  constexpr int kHalf = kPanel / 2;
  for (int i = 0; i < tile.rows; ++i) {
    for (int j = 0; j < kHalf; j += kLanes) {
      const int64_t column = tile.panel * kHalf + j;
      const __mmask16 lanes = first_lanes(op.columns - column);
      if (!lanes) break;
      __m512 gate = _mm512_loadu_ps(sums.data + i * sums.stride + j);
      __m512 up = _mm512_loadu_ps(sums.data + i * sums.stride + kHalf + j);
      if (op.bias) {
        gate = _mm512_add_ps(gate, _mm512_loadu_ps(op.bias + tile.panel * kPanel + j));
        up = _mm512_add_ps(up, _mm512_loadu_ps(op.bias + tile.panel * kPanel + kHalf + j));
      }
      store_bf16(static_cast<bf16*>(op.y) + (tile.row + i) * op.columns + column, _mm512_mul_ps(silu(gate), up), lanes);
    }
  }
}

// A tile reads the panel once. Where there is one tile, memory is the limit, and the hardware's own prefetching does
// best with a little help some way ahead in the same stream (how far was found by trying). Where there are several,
// they share the fetching of the next panel, which then arrives while this one is multiplied.
constexpr int64_t kBytesAhead = 5120;

template <Start start>
void multiply_and_fetch(int64_t tile, int64_t tiles, int rows, Matrix a, const bf16* b, int64_t pairs, Sums c,
                        const bf16* next_panel) {
  const int64_t bytes = pairs * kPanel * 4;
  const auto* next = reinterpret_cast<const char*>(next_panel);
  if (tiles == 1) return multiply_rows<start, 4>(rows, a, b, pairs, c, reinterpret_cast<const char*>(b) + kBytesAhead);
  if (!next || tile >= 4) return multiply_rows<start>(rows, a, b, pairs, c);
  if (tiles >= 4) return multiply_rows<start, 1>(rows, a, b, pairs, c, next + tile * bytes / 4);
  if (tile < 2) return multiply_rows<start, 2>(rows, a, b, pairs, c, next + tile * bytes / 2);
  return multiply_rows<start>(rows, a, b, pairs, c);
}

struct Rows {
  int64_t begin, end;
};

// One panel for a block of rows. next_panel: what this thread is likely to be given next, or null.
inline void compute_block(const Linear& op, Rows rows, int64_t panel, const bf16* next_panel) {
  alignas(64) thread_local float scratch[kBlockRows * kPanel];
  const int64_t pairs = op.k / 2;
  const bf16* b = op.packed + panel * pairs * kPanel * 2;
  const RowTiles tiles{rows.end - rows.begin};
  for (int64_t k = 0; k < pairs; k += kBlockPairs) {
    const int64_t count = std::min(kBlockPairs, pairs - k);
    const bool is_last = k + count == pairs, is_only = count == pairs;
    const bf16* part = b + k * kPanel * 2;
    const bf16* next = is_last ? next_panel : part + count * kPanel * 2;
    for (int64_t i = 0; i < tiles.count; ++i) {
      const TileOfOutput tile{rows.begin + tiles.begin(i), panel, tiles.size(i)};
      const Matrix a{op.x + tile.row * op.k + 2 * k, op.k};
      const Sums sums{is_only ? scratch : scratch + tiles.begin(i) * kPanel, kPanel};
      if (k == 0) {
        multiply_and_fetch<Start::kZero>(i, tiles.count, tile.rows, a, part, count, sums, next);
      } else {
        multiply_and_fetch<Start::kAdd>(i, tiles.count, tile.rows, a, part, count, sums, next);
      }
      if (!is_last) continue;
      if (op.output == Output::kSwiGLU) {
        store_swiglu(op, tile, sums);
      } else {
        store_plain(op, tile, sums);
      }
    }
  }
}

}  // namespace linear_detail

inline void linear(ThreadPool& pool, const Linear& op) {
  using namespace linear_detail;
  const int64_t panels = num_panels(op.output == Output::kSwiGLU ? 2 * op.columns : op.columns);
  const int64_t panel_size = op.k / 2 * kPanel * 2;
  const int64_t blocks = (op.m + kBlockRows - 1) / kBlockRows;
  // A task is a run of panels, so that each thread reads memory in long streams, but there are enough to share out.
  const int64_t run = std::clamp<int64_t>(panels / 16, 1, 8), runs = (panels + run - 1) / run;
  // Panels pass by a block of rows, not the other way round: the rows of x are the smaller part, and stay.
  pool.for_each(blocks * runs, [&](int64_t task, int) {
    const int64_t row = task / runs * kBlockRows, first = task % runs * run, end = std::min(first + run, panels);
    for (int64_t panel = first; panel < end; ++panel) {
      const int64_t next = panel + 1 < end ? panel + 1 : first + run * pool.num_threads();
      const bf16* next_panel = next < panels ? op.packed + next * panel_size : nullptr;
      compute_block(op, {row, std::min(row + kBlockRows, op.m)}, panel, next_panel);
    }
  });
}

}  // namespace pdserve
