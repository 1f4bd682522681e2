// From logits to tokens as engine/sampler.py defines it, token for token, without noise for the whole vocabulary and
// without a sort.
//
// Noise: as -log(u) >= 1 - u, a token's g = -log(-log(u)) is at most -log(1 - u). So it can beat the best score so far
// only if 1 - u <= exp(score - best), which takes no logarithm to find out; the few tokens that pass, some ten of a
// row, are computed in double.
//
// top_p: the allowed tokens are the beginning of a ranking. The winner among all is the winner among the allowed if it
// is one of them, and to know that, it takes the sum of what is ranked before it. If it is not, neither is any token
// behind it, so the next draw is among those before it.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"
#include "thread_pool.h"

namespace pdserve {

struct SampledRow {
  uint64_t seed;
  int64_t position;
  double temperature;  // 0: the token of the highest logit
  double top_p;        // 1: off
  int64_t top_k;       // 0: off
};

struct Sampling {
  const float* logits;  // [count][vocab_size]
  int64_t vocab_size;
  const SampledRow* rows;
  int64_t count;
  int64_t* tokens;
};

struct Token {
  float logit;
  int32_t id;
};

inline bool is_before(const Token& a, const Token& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// Every token of a row, or a choice of them.
struct Choice {
  const float* logits;
  const int32_t* ids;  // null: 0, 1, 2 ...
  int64_t size;

  Token at(int64_t i) const { return {logits[i], ids == nullptr ? static_cast<int32_t>(i) : ids[i]}; }

  __m512i load_ids(int64_t i, __mmask16 lanes) const {
    if (ids != nullptr) return _mm512_maskz_loadu_epi32(lanes, ids + i);
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_add_epi32(first, _mm512_set1_epi32(static_cast<int>(i)));
  }
};

inline __mmask16 before(__m512 logits, __m512i ids, const Token& limit) {
  const __m512 logit = _mm512_set1_ps(limit.logit);
  const __mmask16 equal = _mm512_cmp_ps_mask(logits, logit, _CMP_EQ_OQ);
  return _mm512_cmp_ps_mask(logits, logit, _CMP_GT_OQ) |
         _mm512_mask_cmplt_epi32_mask(equal, ids, _mm512_set1_epi32(limit.id));
}

// ---------------------------------------------------------------- noise

// SplitMix64 (Steele, Lea, Flood 2014).
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15, kMix1 = 0xBF58476D1CE4E5B9, kMix2 = 0x94D049BB133111EB;

inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * kMix1;
  x = (x ^ (x >> 27)) * kMix2;
  return x ^ (x >> 31);
}

inline __m512i mix(__m512i x) {
  x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 30)), _mm512_set1_epi64(kMix1));
  x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 27)), _mm512_set1_epi64(kMix2));
  return _mm512_xor_si512(x, _mm512_srli_epi64(x, 31));
}

inline double gumbel(uint64_t key, int32_t id) {
  const uint64_t bits = mix(key + static_cast<uint64_t>(id) * kGolden) >> 12;
  return -std::log(-std::log((static_cast<double>(bits) + 0.5) * 0x1p-52));
}

// 1 - u of 8 tokens, or up to 2^-53 less.
inline __m256 complement(uint64_t key, __m256i ids) {
  const __m512i id = _mm512_cvtepi32_epi64(ids);
  const __m512i offset = _mm512_mullo_epi64(id, _mm512_set1_epi64(kGolden));
  const __m512i bits = mix(_mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(key)), offset));
  const __m512i rest = _mm512_srli_epi64(_mm512_xor_si512(bits, _mm512_set1_epi64(-1)), 12);
  return _mm256_mul_ps(_mm512_cvtepi64_ps(rest), _mm256_set1_ps(0x1p-52f));
}

// ---------------------------------------------------------------- one draw

struct Draw {
  Token highest;  // its score is 0
  double temperature;
  uint64_t key;

  double score(float logit) const { return (static_cast<double>(logit) - highest.logit) / temperature; }

  // What float makes of 1 / temperature; not infinite, as 0 times infinity is no number. Where it is cut off scores
  // only seem higher than they are.
  float inverse() const { return static_cast<float>(std::min(1 / temperature, 1e30)); }
};

// The winner among the tokens before `limit`, of which the highest is one.
inline Token draw(const Choice& choice, const Draw& of, const Token& limit) {
  // The error of a score in float is under 1e-4 wherever a token has a chance, and that of exp2 far less.
  constexpr float kMargin = 1e-3f, kImpossible = -100.0f;
  Token best = of.highest;
  double best_score = gumbel(of.key, best.id);
  const __m512 highest = _mm512_set1_ps(of.highest.logit), scale = _mm512_set1_ps(of.inverse() * kLog2E);
  __m512 offset = _mm512_set1_ps(kMargin - static_cast<float>(best_score) * kLog2E);
  for (int64_t i = 0; i < choice.size; i += kLanes) {
    const __mmask16 lanes = first_lanes(choice.size - i);
    const __m512 logits = _mm512_maskz_loadu_ps(lanes, choice.logits + i);
    const __m512i ids = choice.load_ids(i, lanes);
    const __m512 power = _mm512_fmadd_ps(_mm512_sub_ps(logits, highest), scale, offset);
    const __m512 chance = exp2(_mm512_max_ps(power, _mm512_set1_ps(kImpossible)));
    const __m512 needed = _mm512_insertf32x8(_mm512_castps256_ps512(complement(of.key, _mm512_castsi512_si256(ids))),
                                             complement(of.key, _mm512_extracti64x4_epi64(ids, 1)), 1);
    uint32_t passed = lanes & before(logits, ids, limit) & _mm512_cmp_ps_mask(needed, chance, _CMP_LE_OQ);
    for (; passed != 0; passed &= passed - 1) {
      const Token token = choice.at(i + __builtin_ctz(passed));
      const double score = of.score(token.logit) + gumbel(of.key, token.id);
      if (score < best_score || (score == best_score && token.id >= best.id)) continue;
      best = token;
      best_score = score;
      offset = _mm512_set1_ps(kMargin - static_cast<float>(score) * kLog2E);
    }
  }
  return best;
}

// ---------------------------------------------------------------- top_p

// 1, 1/2, 1/6 ...: the series of e^x, to double's last bits where |x| <= log(2) / 2.
struct Series {
  static constexpr int kTerms = 14;
  double of[kTerms];
  constexpr Series() : of() {
    of[0] = 1;
    for (int k = 1; k < kTerms; ++k) of[k] = of[k - 1] / k;
  }
};

// 2^40 e^x to the nearest integer, x <= 0.
inline __m512i mass(__m512d x) {
  constexpr Series series;
  constexpr double kLog2High = 0x1.62e42fefa39efp-1, kLog2Low = 0x1.abc9e3b39803fp-56;
  x = _mm512_max_pd(x, _mm512_set1_pd(-100.0));
  const __m512d n = _mm512_roundscale_pd(_mm512_mul_pd(x, _mm512_set1_pd(1 / kLog2High)),
                                         _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512d r = _mm512_fnmadd_pd(n, _mm512_set1_pd(kLog2High), x);
  r = _mm512_fnmadd_pd(n, _mm512_set1_pd(kLog2Low), r);
  __m512d sum = _mm512_set1_pd(series.of[Series::kTerms - 1]);
#pragma GCC unroll 16
  for (int k = Series::kTerms - 2; k >= 0; --k) sum = _mm512_fmadd_pd(sum, r, _mm512_set1_pd(series.of[k]));
  return _mm512_cvtpd_epi64(_mm512_scalef_pd(sum, _mm512_add_pd(n, _mm512_set1_pd(40.0))));
}

struct Masses {
  int64_t before, total;
};

inline Masses masses(const Choice& choice, const Draw& of, const Token& limit) {
  constexpr float kNothing = -30.0f;  // 2^40 e^-30 < 0.2
  const __m512 highest = _mm512_set1_ps(of.highest.logit), inverse = _mm512_set1_ps(of.inverse());
  const __m512d highest_double = _mm512_set1_pd(of.highest.logit), temperature = _mm512_set1_pd(of.temperature);
  __m512i sum_before = _mm512_setzero_si512(), sum = _mm512_setzero_si512();
  for (int64_t i = 0; i < choice.size; i += kLanes) {
    const __mmask16 lanes = first_lanes(choice.size - i);
    const __m512 logits = _mm512_maskz_loadu_ps(lanes, choice.logits + i);
    const __m512 near = _mm512_mul_ps(_mm512_sub_ps(logits, highest), inverse);
    const __mmask16 counted = _mm512_mask_cmp_ps_mask(lanes, near, _mm512_set1_ps(kNothing), _CMP_GT_OQ);
    if (counted == 0) continue;
    const __mmask16 is_first = before(logits, choice.load_ids(i, lanes), limit);
    const __m256 halves[2] = {_mm512_castps512_ps256(logits), _mm512_extractf32x8_ps(logits, 1)};
    for (int half = 0; half < 2; ++half) {
      const __m512d distance = _mm512_sub_pd(_mm512_cvtps_pd(halves[half]), highest_double);
      const __m512i these = _mm512_maskz_mov_epi64(static_cast<__mmask8>(counted >> 8 * half),
                                                   mass(_mm512_div_pd(distance, temperature)));
      sum = _mm512_add_epi64(sum, these);
      sum_before = _mm512_mask_add_epi64(sum_before, static_cast<__mmask8>(is_first >> 8 * half), sum_before, these);
    }
  }
  return {_mm512_reduce_add_epi64(sum_before), _mm512_reduce_add_epi64(sum)};
}

inline int64_t draw(const Choice& choice, const Draw& of, double top_p) {
  Token limit{-std::numeric_limits<float>::infinity(), std::numeric_limits<int32_t>::max()};  // all come before it
  while (true) {
    const Token winner = draw(choice, of, limit);
    if (top_p == 1 || winner.id == of.highest.id) return winner.id;
    const Masses sums = masses(choice, of, winner);
    if (static_cast<double>(sums.before) < top_p * static_cast<double>(sums.total)) return winner.id;
    limit = winner;
  }
}

// ---------------------------------------------------------------- top_k

// The k tokens that rank first, in any order; fewer if the others have no chance at all.
class Shortlist {
 public:
  Shortlist(const float* logits, int64_t size, int64_t k) {
    const int64_t room = 2 * k + 256;
    std::vector<Token> found(room + kLanes);
    int64_t count = 0;
    float least = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < size; i += kLanes) {
      const __mmask16 lanes = first_lanes(size - i);
      const __m512 these = _mm512_maskz_loadu_ps(lanes, logits + i);
      uint32_t passed = _mm512_mask_cmp_ps_mask(lanes, these, _mm512_set1_ps(least), _CMP_GT_OQ);
      for (; passed != 0; passed &= passed - 1) {
        const int64_t id = i + __builtin_ctz(passed);
        found[count++] = {logits[id], static_cast<int32_t>(id)};
      }
      if (count >= room) {
        count = keep_first(found, count, k);
        least = found[k - 1].logit;  // one that only equals it comes later and so ranks behind it
      }
    }
    count = keep_first(found, count, k);
    for (int64_t i = 0; i < count; ++i) {
      logits_.push_back(found[i].logit);
      ids_.push_back(found[i].id);
    }
  }

  Choice choice() const { return {logits_.data(), ids_.data(), static_cast<int64_t>(ids_.size())}; }

 private:
  static int64_t keep_first(std::vector<Token>& found, int64_t count, int64_t k) {
    if (count <= k) return count;
    std::nth_element(found.begin(), found.begin() + k - 1, found.begin() + count, is_before);
    return k;
  }

  std::vector<float> logits_;
  std::vector<int32_t> ids_;
};

// ---------------------------------------------------------------- rows

// The first token of the highest logit; the first that is not a number, if there is one.
inline Token find_highest(const float* logits, int64_t size) {
  __m512 most = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __mmask16 has_nan = 0;
  for (int64_t i = 0; i < size; i += kLanes) {
    const __m512 these = _mm512_mask_loadu_ps(most, first_lanes(size - i), logits + i);
    has_nan |= _mm512_cmp_ps_mask(these, these, _CMP_UNORD_Q);
    most = _mm512_max_ps(these, most);
  }
  const float logit = has_nan ? std::numeric_limits<float>::quiet_NaN() : _mm512_reduce_max_ps(most);
  for (int64_t i = 0; i < size; i += kLanes) {
    const __mmask16 lanes = first_lanes(size - i);
    const __m512 these = _mm512_maskz_loadu_ps(lanes, logits + i);
    const __mmask16 found = has_nan ? _mm512_mask_cmp_ps_mask(lanes, these, these, _CMP_UNORD_Q)
                                    : _mm512_mask_cmp_ps_mask(lanes, these, _mm512_set1_ps(logit), _CMP_EQ_OQ);
    if (found != 0) return {logit, static_cast<int32_t>(i + __builtin_ctz(found))};
  }
  return {logit, 0};
}

inline int64_t sample_row(const float* logits, int64_t vocab_size, const SampledRow& row) {
  const Token highest = find_highest(logits, vocab_size);
  if (row.temperature == 0 || !std::isfinite(highest.logit)) return highest.id;
  const uint64_t key = mix(mix(row.seed + kGolden) ^ static_cast<uint64_t>(row.position));
  const Draw of{highest, row.temperature, key};
  if (row.top_k == 0 || row.top_k >= vocab_size) return draw({logits, nullptr, vocab_size}, of, row.top_p);
  const Shortlist shortlist(logits, vocab_size, row.top_k);
  return draw(shortlist.choice(), of, row.top_p);
}

inline void sample(ThreadPool& pool, const Sampling& op) {
  pool.for_each(op.count, [&](int64_t row, int) {
    op.tokens[row] = sample_row(op.logits + row * op.vocab_size, op.vocab_size, op.rows[row]);
  });
}

}  // namespace pdserve
