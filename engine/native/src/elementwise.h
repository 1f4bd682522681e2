// The passes between the matrix products: normalisation, and rotary embedding on the way into the paged cache.
#pragma once

#include <algorithm>

#include "simd.h"
#include "thread_pool.h"

namespace pdserve {

struct RmsNorm {
  const bf16* x;       // [m, n]
  const bf16* weight;  // [n]
  bf16* y;             // [m, n]
  int64_t m, n;
  float eps;
};

// Rounds where the torch model does: the normalised value to bf16, times the weight to bf16. y may be x.
inline void rms_norm_row(const bf16* x, const bf16* weight, int64_t n, float eps, bf16* y) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += kLanes) {
    const __m512 value = load_float(x + i, first_lanes(n - i));
    squares = _mm512_fmadd_ps(value, value, squares);
  }
  const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(n);
  const __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + eps));
  for (int64_t i = 0; i < n; i += kLanes) {
    const __mmask16 lanes = first_lanes(n - i);
    const __m512 normalised = to_float(to_bf16(_mm512_mul_ps(load_float(x + i, lanes), scale)));
    store_bf16(y + i, _mm512_mul_ps(normalised, load_float(weight + i, lanes)), lanes);
  }
}

// Small batches are not worth waking a thread for: tasks of this many numbers, some microseconds each.
constexpr int64_t kNumbersPerTask = 16384;

template <class Work>
void for_each_row(ThreadPool& pool, int64_t rows, int64_t row_size, const Work& work) {
  const int64_t rows_per_task = std::max<int64_t>(1, kNumbersPerTask / row_size);
  pool.for_each((rows + rows_per_task - 1) / rows_per_task, [&](int64_t task, int) {
    const int64_t end = std::min(rows, (task + 1) * rows_per_task);
    for (int64_t row = task * rows_per_task; row < end; ++row) work(row);
  });
}

inline void rms_norm(ThreadPool& pool, const RmsNorm& op) {
  for_each_row(pool, op.m, op.n,
               [&](int64_t row) { rms_norm_row(op.x + row * op.n, op.weight, op.n, op.eps, op.y + row * op.n); });
}

// Of each head's q and k by itself, in place.
struct HeadNorms {
  bf16* qkv;             // [tokens, (heads + 2 * kv_heads) * head_dim]: q heads, then k, then v
  const bf16* q_weight;  // [head_dim]
  const bf16* k_weight;
  int64_t tokens, heads, kv_heads, head_dim;
  float eps;
};

inline void head_norms(ThreadPool& pool, const HeadNorms& op) {
  const int64_t width = (op.heads + 2 * op.kv_heads) * op.head_dim;
  for_each_row(pool, op.tokens, width, [&](int64_t token) {
    bf16* at = op.qkv + token * width;
    for (int64_t head = 0; head < op.heads + op.kv_heads; ++head, at += op.head_dim) {
      rms_norm_row(at, head < op.heads ? op.q_weight : op.k_weight, op.head_dim, op.eps, at);
    }
  });
}

struct RotaryAndCache {
  bf16* qkv;            // as in HeadNorms; q is turned in place
  const float* angles;  // [positions, head_dim]: of each position half a row of cosines, then of sines
  const int64_t* positions;  // [tokens]
  const int64_t* slots;      // [tokens], where the token's k and v go
  bf16* keys;                // [slots, kv_heads, head_dim]
  bf16* values;
  int64_t tokens, heads, kv_heads, head_dim;
};

// Each pair (x[i], x[i + head_dim / 2]) is turned by its angle, in float32.
inline void rotate(const bf16* from, const float* cos, const float* sin, int64_t half, bf16* to) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const __m512 first = load_float(from + i), second = load_float(from + half + i);
    const __m512 c = _mm512_loadu_ps(cos + i), s = _mm512_loadu_ps(sin + i);
    store_bf16(to + i, _mm512_fmsub_ps(first, c, _mm512_mul_ps(second, s)));
    store_bf16(to + half + i, _mm512_fmadd_ps(second, c, _mm512_mul_ps(first, s)));
  }
}

inline void rotary_and_cache(ThreadPool& pool, const RotaryAndCache& op) {
  const int64_t half = op.head_dim / 2, kv_size = op.kv_heads * op.head_dim;
  const int64_t width = op.heads * op.head_dim + 2 * kv_size;
  for_each_row(pool, op.tokens, width, [&](int64_t token) {
    bf16* q = op.qkv + token * width;
    const bf16* k = q + op.heads * op.head_dim;
    const float *cos = op.angles + op.positions[token] * op.head_dim, *sin = cos + half;
    for (int64_t i = 0; i < op.heads * op.head_dim; i += op.head_dim) rotate(q + i, cos, sin, half, q + i);
    bf16* key = op.keys + op.slots[token] * kv_size;
    for (int64_t i = 0; i < kv_size; i += op.head_dim) rotate(k + i, cos, sin, half, key + i);
    __builtin_memcpy(op.values + op.slots[token] * kv_size, k + kv_size, kv_size * sizeof(bf16));
  });
}

}  // namespace pdserve
