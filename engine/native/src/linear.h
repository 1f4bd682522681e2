// y = x · Wᵀ with W packed once, and what is done to each result before it is stored.
#pragma once

#include <algorithm>

#include "packed_weight.h"

namespace pdserve {

enum class Output : int { kBf16 = 0, kFloat = 1, kSwiGLU = 2 };

struct Linear {
  const bf16* x;  // [m, k]
  const void* packed;    // Bf16Row, or Int8Row with scales
  const float* scales;   // [panels * 64] in the packed order, or null
  const float* bias;     // the same
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

// Sums of 16 columns of the packed order, scaled and with their bias.
inline __m512 finished(const Linear& op, const float* sums, int64_t column) {
  __m512 y = _mm512_loadu_ps(sums);
  if (op.scales) y = _mm512_mul_ps(y, _mm512_loadu_ps(op.scales + column));
  if (op.bias) y = _mm512_add_ps(y, _mm512_loadu_ps(op.bias + column));
  return y;
}

inline void store_plain(const Linear& op, const TileOfOutput& tile, Sums sums) {
  for (int i = 0; i < tile.rows; ++i) {
    const int64_t row = tile.row + i;
    for (int j = 0; j < kPanel; j += kLanes) {
      const int64_t column = tile.panel * kPanel + j;
      const __mmask16 lanes = first_lanes(op.columns - column);
      if (!lanes) break;
      __m512 y = finished(op, sums.data + i * sums.stride + j, column);
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
      const int64_t packed_column = tile.panel * kPanel + j;
      const __m512 gate = finished(op, sums.data + i * sums.stride + j, packed_column);
      const __m512 up = finished(op, sums.data + i * sums.stride + kHalf + j, packed_column + kHalf);
      store_bf16(static_cast<bf16*>(op.y) + (tile.row + i) * op.columns + column, _mm512_mul_ps(silu(gate), up), lanes);
    }
  }
}

inline void store(const Linear& op, const TileOfOutput& tile, Sums sums) {
  if (op.output == Output::kSwiGLU) {
    store_swiglu(op, tile, sums);
  } else {
    store_plain(op, tile, sums);
  }
}

struct Rows {
  int64_t begin, end;
};

// Pairs [begin, begin + count) of one panel, for a block of rows.
struct Stretch {
  const Linear& op;
  Rows rows;
  int64_t panel, begin, count;
  const char* packed;  // where these pairs lie
  const char* next;    // as many bytes that are likely to be wanted next, or null

  bool is_first() const { return begin == 0; }
  bool is_last() const { return begin + count == op.k / 2; }
};

// A tile reads the panel once. Where there is one tile, memory is the limit, and the hardware's own prefetching does
// best with a little help some way ahead in the same stream (how far was found by trying). Where there are several,
// they share the fetching of the next panel, which then arrives while this one is multiplied.
constexpr int64_t kBytesAhead = 5120;

// Lines: how many cache lines of the packed weight hold the pairs of one k. b: those pairs, as load_columns takes them.
template <Start start, int Lines, class Panel>
void multiply_and_fetch(const Stretch& stretch, const RowTiles& tiles, int64_t tile, Panel b, Sums c) {
  const Linear& op = stretch.op;
  const Matrix a{op.x + (stretch.rows.begin + tiles.begin(tile)) * op.k + 2 * stretch.begin, op.k};
  const int rows = tiles.size(tile);
  const int64_t pairs = stretch.count;
  if (tiles.count == 1) return multiply_rows<start, Lines>(rows, a, b, pairs, c, stretch.packed + kBytesAhead);
  const int64_t sharers = tiles.count >= Lines ? Lines : 2;
  if (!stretch.next || tile >= sharers) return multiply_rows<start>(rows, a, b, pairs, c);
  const char* share = stretch.next + tile * pairs * Lines * kLineBytes / sharers;
  if (sharers == Lines) return multiply_rows<start, 1>(rows, a, b, pairs, c, share);
  multiply_rows<start, Lines / 2>(rows, a, b, pairs, c, share);
}

template <int Lines, class Panel>
void compute_tile(const Stretch& stretch, const RowTiles& tiles, int64_t tile, Panel b, float* scratch) {
  // Sums that are not finished keep their place until the next stretch.
  const bool is_only = stretch.is_first() && stretch.is_last();
  const Sums sums{is_only ? scratch : scratch + tiles.begin(tile) * kPanel, kPanel};
  if (stretch.is_first()) {
    multiply_and_fetch<Start::kZero, Lines>(stretch, tiles, tile, b, sums);
  } else {
    multiply_and_fetch<Start::kAdd, Lines>(stretch, tiles, tile, b, sums);
  }
  if (stretch.is_last()) {
    store(stretch.op, {stretch.rows.begin + tiles.begin(tile), stretch.panel, tiles.size(tile)}, sums);
  }
}

inline void compute_stretch(const Stretch& stretch, const Bf16Row* b, float* scratch) {
  constexpr int kLines = sizeof(Bf16Row) / kLineBytes;
  const RowTiles tiles{stretch.rows.end - stretch.rows.begin};
  for (int64_t i = 0; i < tiles.count; ++i) compute_tile<kLines>(stretch, tiles, i, b, scratch);
}

// Where there are several tiles the first one widens the codes for all.
inline void compute_stretch(const Stretch& stretch, const Int8Row* b, float* scratch) {
  constexpr int kLines = sizeof(Int8Row) / kLineBytes;
  alignas(64) thread_local Bf16Row widened[kBlockPairs];
  const RowTiles tiles{stretch.rows.end - stretch.rows.begin};
  if (tiles.count == 1) return compute_tile<kLines>(stretch, tiles, 0, b, scratch);
  compute_tile<kLines>(stretch, tiles, 0, Widening{b, widened}, scratch);
  for (int64_t i = 1; i < tiles.count; ++i) {
    compute_tile<kLines>(stretch, tiles, i, static_cast<const Bf16Row*>(widened), scratch);
  }
}

// One panel for a block of rows. next_panel: what this thread is likely to be given next, or null.
template <class Row>
void compute_block(const Linear& op, Rows rows, int64_t panel, const Row* next_panel) {
  alignas(64) thread_local float scratch[kBlockRows * kPanel];
  const int64_t pairs = op.k / 2;
  const Row* b = static_cast<const Row*>(op.packed) + panel * pairs;
  for (int64_t k = 0; k < pairs; k += kBlockPairs) {
    const int64_t count = std::min(kBlockPairs, pairs - k);
    const Row* next = k + count == pairs ? next_panel : b + k + count;
    const Stretch stretch{.op = op,
                          .rows = rows,
                          .panel = panel,
                          .begin = k,
                          .count = count,
                          .packed = reinterpret_cast<const char*>(b + k),
                          .next = reinterpret_cast<const char*>(next)};
    compute_stretch(stretch, b + k, scratch);
  }
}

template <class Row>
void compute(ThreadPool& pool, const Linear& op) {
  const int64_t panels = num_panels(op.output == Output::kSwiGLU ? 2 * op.columns : op.columns);
  const int64_t blocks = (op.m + kBlockRows - 1) / kBlockRows;
  // A task is a run of panels, so that each thread reads memory in long streams, but there are enough to share out.
  const int64_t run = std::clamp<int64_t>(panels / 16, 1, 8), runs = (panels + run - 1) / run;
  // Panels pass by a block of rows, not the other way round: the rows of x are the smaller part, and stay.
  pool.for_each(blocks * runs, [&](int64_t task, int) {
    const int64_t row = task / runs * kBlockRows, first = task % runs * run, end = std::min(first + run, panels);
    for (int64_t panel = first; panel < end; ++panel) {
      const int64_t next = panel + 1 < end ? panel + 1 : first + run * pool.num_threads();
      const Row* next_panel = next < panels ? static_cast<const Row*>(op.packed) + next * (op.k / 2) : nullptr;
      compute_block(op, {row, std::min(row + kBlockRows, op.m)}, panel, next_panel);
    }
  });
}

}  // namespace linear_detail

inline void linear(ThreadPool& pool, const Linear& op) {
  if (op.scales) return linear_detail::compute<Int8Row>(pool, op);
  linear_detail::compute<Bf16Row>(pool, op);
}

}  // namespace pdserve
