// A decoder layer with an ordinary MLP: the operations of the other files in their order, in one call.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "linear.h"

namespace pdserve {

// What a layer keeps from step to step.
struct Layer {
  const bf16* attention_norm;  // [hidden]
  const bf16* mlp_norm;
  const bf16* q_norm;  // [head_dim], of each head; or null, and k_norm too
  const bf16* k_norm;
  Linear qkv, o, gate_up, down;  // x, residual, y and m are filled in by each step
  bf16* keys;                    // [blocks, block_size, kv_heads, head_dim]
  bf16* values;
  int64_t block_size, heads, kv_heads, head_dim;
  int64_t window;  // as in Attention
  float scale, eps;

  int64_t hidden() const { return qkv.k; }
};

// What all layers of a step have in common.
struct LayerStep {
  int64_t tokens, sequences;
  const float* angles;         // as in RotaryAndCache
  const int64_t* positions;    // [tokens]
  const int64_t* slots;        // [tokens]
  const int32_t* block_table;  // [sequences, table_width]
  int64_t table_width;
  const int32_t* query_start;  // [sequences + 1]
  const int32_t* seq_lens;     // [sequences]
  bf16* x;                     // [tokens, hidden], what one layer hands to the next
  bf16* workspace;             // [tokens * (hidden + columns of qkv + inputs of o + inputs of down)]
};

namespace layer_detail {

inline RmsNorm norm_of(const Layer& layer, const bf16* weight, const bf16* x, bf16* y, int64_t tokens) {
  return {.x = x, .weight = weight, .y = y, .m = tokens, .n = layer.hidden(), .eps = layer.eps};
}

inline HeadNorms head_norms_of(const Layer& layer, bf16* qkv, int64_t tokens) {
  return {.qkv = qkv,
          .q_weight = layer.q_norm,
          .k_weight = layer.k_norm,
          .tokens = tokens,
          .heads = layer.heads,
          .kv_heads = layer.kv_heads,
          .head_dim = layer.head_dim,
          .eps = layer.eps};
}

inline RotaryAndCache rotary_of(const Layer& layer, const LayerStep& step, bf16* qkv) {
  return {.qkv = qkv,
          .angles = step.angles,
          .positions = step.positions,
          .slots = step.slots,
          .keys = layer.keys,
          .values = layer.values,
          .tokens = step.tokens,
          .heads = layer.heads,
          .kv_heads = layer.kv_heads,
          .head_dim = layer.head_dim};
}

inline Attention attention_of(const Layer& layer, const LayerStep& step, const bf16* qkv, bf16* out) {
  return {.query = qkv,
          .query_stride = layer.qkv.columns,
          .cache = {.keys = layer.keys,
                    .values = layer.values,
                    .block_table = step.block_table,
                    .table_width = step.table_width,
                    .block_size = layer.block_size,
                    .kv_heads = layer.kv_heads,
                    .head_dim = layer.head_dim},
          .query_start = step.query_start,
          .seq_lens = step.seq_lens,
          .sequences = step.sequences,
          .heads = layer.heads,
          .window = layer.window,
          .scale = layer.scale,
          .out = out};
}

}  // namespace layer_detail

// step.x is changed in place.
inline void layer(ThreadPool& pool, const Layer& layer, const LayerStep& step, AttentionWorkspaces& spaces) {
  using namespace layer_detail;
  const int64_t tokens = step.tokens;
  bf16* x = step.x;
  bf16* normed = step.workspace;
  bf16* qkv = normed + tokens * layer.hidden();
  bf16* attended = qkv + tokens * layer.qkv.columns;
  bf16* activated = attended + tokens * layer.o.k;

  rms_norm(pool, norm_of(layer, layer.attention_norm, x, normed, tokens));
  linear(pool, applied(layer.qkv, normed, nullptr, qkv, tokens));
  if (layer.q_norm) head_norms(pool, head_norms_of(layer, qkv, tokens));
  rotary_and_cache(pool, rotary_of(layer, step, qkv));
  attention(pool, attention_of(layer, step, qkv, attended), spaces);
  linear(pool, applied(layer.o, attended, x, x, tokens));

  rms_norm(pool, norm_of(layer, layer.mlp_norm, x, normed, tokens));
  linear(pool, applied(layer.gate_up, normed, nullptr, activated, tokens));
  linear(pool, applied(layer.down, activated, x, x, tokens));
}

}  // namespace pdserve
