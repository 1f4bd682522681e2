// What the machine can do at most, measured with the same threads: the denominators of the benches.
#pragma once

#include <atomic>

#include "simd.h"
#include "thread_pool.h"

namespace pdserve {

// Reads the memory once. The sum keeps the reads from being optimised away.
inline float read_memory(ThreadPool& pool, const char* data, int64_t bytes) {
  constexpr int64_t kChunk = 1 << 18;
  std::atomic<int32_t> total{0};
  pool.for_each(bytes / kChunk, [&](int64_t chunk, int) {
    const char* from = data + chunk * kChunk;
    __m512i sum[4] = {};
    for (int64_t i = 0; i < kChunk; i += 256) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        sum[j] = _mm512_xor_si512(sum[j], _mm512_loadu_si512(from + i + j * 64));
        _mm_prefetch(from + i + j * 64 + 4096, _MM_HINT_T1);
      }
    }
    const __m512i all = _mm512_xor_si512(_mm512_xor_si512(sum[0], sum[1]), _mm512_xor_si512(sum[2], sum[3]));
    total.fetch_xor(_mm512_reduce_add_epi32(all));
  });
  return static_cast<float>(total.load());
}

// 24 independent sums and nothing to load: count * 24 * 64 floating-point operations on every thread.
inline float multiply_registers(ThreadPool& pool, int64_t count) {
  std::atomic<int32_t> total{0};
  pool.for_each(pool.num_threads(), [&](int64_t, int) {
    __m512 sum[24];
    for (int j = 0; j < 24; ++j) sum[j] = _mm512_set1_ps(static_cast<float>(j));  // alike, they would become one
    __m512bh a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3c003c00));
    for (int64_t i = 0; i < count; ++i) {
      asm volatile("" : "+v"(a));
#pragma GCC unroll 24
      for (int j = 0; j < 24; ++j) sum[j] = _mm512_dpbf16_ps(sum[j], a, a);
    }
    float all = 0;
    for (int j = 0; j < 24; ++j) all += _mm512_reduce_add_ps(sum[j]);
    total.fetch_xor(static_cast<int32_t>(all));
  });
  return static_cast<float>(total.load());
}

}  // namespace pdserve
