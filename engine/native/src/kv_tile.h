// 64 tokens of one kv head: found through the block table, fetched ahead, and multiplied in one of two ways.
//
// In the cache a token's head is [head_dim] bf16 numbers, wherever its block is. The matrix product wants pairs:
//
//   keys:    [head_dim / 2 pairs][64 tokens]                  scores = q · keys: a token is a column
//   values:  [head_dim / 64 panels][32 token pairs][64 dims]  out = weights · values: a dimension is a column
//
// For many rows (prefill) the tile is packed in that order once and used by all of them; for a few (decode) it is
// turned in registers on its way to the multipliers and never stored.
//
// Past its last token a tile repeats it: the weights there are zero, but what lies in an unwritten slot may be NaN, and
// 0 * NaN is NaN.
#pragma once

#include "tile.h"

namespace pdserve {

constexpr int kTileTokens = kPanel;
constexpr int kMaxHeadDim = 256;

struct PagedCache {
  const bf16* keys;  // [blocks, block_size, kv_heads, head_dim]
  const bf16* values;
  const int32_t* block_table;  // [sequences, table_width]
  int64_t table_width, block_size, kv_heads, head_dim;
};

// Where 64 tokens lie: offsets of their first head into the cache's keys and values.
struct Location {
  int64_t offset[kTileTokens];
  int count;  // the offsets from here on repeat the last
};

// Blocks are walked: no division for each token.
inline void locate(const PagedCache& cache, int64_t sequence, int64_t begin, int count, Location& at) {
  const int32_t* block = cache.block_table + sequence * cache.table_width + begin / cache.block_size;
  int64_t within = begin % cache.block_size;
  const int64_t token_size = cache.kv_heads * cache.head_dim;
  for (int i = 0; i < count; ++i) {
    at.offset[i] = (*block * cache.block_size + within) * token_size;
    if (++within == cache.block_size) {
      within = 0;
      ++block;
    }
  }
  std::fill(at.offset + count, at.offset + kTileTokens, at.offset[count - 1]);
  at.count = count;
}

// One head's keys or values of the tokens at a location. Blocks lie anywhere, so the hardware cannot guess what will be
// read after this tile; each load therefore sends for the same line of the next one. One by one among the arithmetic,
// as a burst of them would be waited for.
struct Tokens {
  const bf16* data;
  const Location& at;
  const Location& next;
  int64_t head_dim;
  __m512i load(int token, int64_t dim) const {
    _mm_prefetch(reinterpret_cast<const char*>(data + next.offset[token] + dim), _MM_HINT_T1);
    return _mm512_loadu_si512(data + at.offset[token] + dim);
  }
};

// ---------------------------------------------------------------- many rows: pack, then multiply with tile.h

struct PackedTile {
  alignas(64) bf16 keys[kMaxHeadDim * kTileTokens];
  alignas(64) bf16 values[kMaxHeadDim * kTileTokens];
};

inline void pack_keys(const Tokens& keys, bf16* packed) {
  for (int group = 0; group < keys.at.count; group += kLanes) {
    for (int64_t dim = 0; dim < keys.head_dim; dim += 2 * kLanes) {
      __m512i row[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) row[i] = keys.load(group + i, dim);
      transpose_pairs(row);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) _mm512_store_si512(packed + ((dim / 2 + i) * kTileTokens + group) * 2, row[i]);
    }
  }
}

inline void pack_values(const Tokens& values, bf16* packed) {
  for (int token = 0; token < values.at.count; token += 2) {
    for (int64_t dim = 0; dim < values.head_dim; dim += 2 * kLanes) {
      const Interleaved pairs = interleave(values.load(token, dim), values.load(token + 1, dim));
      bf16* to = packed + (dim / kPanel * kTileTokens + token) * kPanel + dim % kPanel * 2;
      _mm512_store_si512(to, pairs.low);
      _mm512_store_si512(to + 2 * kLanes, pairs.high);
    }
  }
}

// ---------------------------------------------------------------- a few rows: multiply on the way

inline __m512bh broadcast_pair(const bf16* pair) {
  int32_t bits;
  __builtin_memcpy(&bits, pair, sizeof bits);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
}

// scores [Rows][64] = query [Rows][head_dim] · keys.
template <int Rows>
void multiply_keys(const bf16* query, const Tokens& keys, float* scores) {
  for (int group = 0; group < keys.at.count; group += kLanes) {
    __m512 sum[Rows] = {};
    for (int64_t dim = 0; dim < keys.head_dim; dim += 2 * kLanes) {
      __m512i pairs[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) pairs[i] = keys.load(group + i, dim);
      transpose_pairs(pairs);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
#pragma GCC unroll 8
        for (int row = 0; row < Rows; ++row) {
          const __m512bh q = broadcast_pair(query + row * keys.head_dim + dim + 2 * i);
          sum[row] = _mm512_dpbf16_ps(sum[row], q, reinterpret_cast<__m512bh>(pairs[i]));
        }
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) _mm512_store_ps(scores + row * kTileTokens + group, sum[row]);
  }
}

// out [Rows][stride] += weights [Rows][64] · values, 32 dimensions at a time.
template <int Rows>
void multiply_values(const bf16* weights, const Tokens& values, float* out, int64_t stride) {
  for (int64_t dim = 0; dim < values.head_dim; dim += 2 * kLanes) {
    __m512 low[Rows], high[Rows];
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      low[row] = _mm512_load_ps(out + row * stride + dim);
      high[row] = _mm512_load_ps(out + row * stride + dim + kLanes);
    }
    for (int token = 0; token < values.at.count; token += 2) {
      const Interleaved pairs = interleave(values.load(token, dim), values.load(token + 1, dim));
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) {
        const __m512bh weight = broadcast_pair(weights + row * kTileTokens + token);
        low[row] = _mm512_dpbf16_ps(low[row], weight, reinterpret_cast<__m512bh>(pairs.low));
        high[row] = _mm512_dpbf16_ps(high[row], weight, reinterpret_cast<__m512bh>(pairs.high));
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      _mm512_store_ps(out + row * stride + dim, low[row]);
      _mm512_store_ps(out + row * stride + dim + kLanes, high[row]);
    }
  }
}

}  // namespace pdserve
