// What lies before and after a model's layers: token ids in, logits of the wanted rows out.
#pragma once

#include "layer.h"

namespace pdserve {

struct Model {
  const bf16* embedding;  // [vocab_size, hidden]
  const Layer* layers;
  const bf16* norm;  // [hidden]
  Linear lm_head;    // x, y and m are filled in by each step
  int64_t vocab_size, num_positions;  // rows of the embedding, and of the step's angles
  float eps;

  int64_t hidden() const { return lm_head.k; }
};

struct ModelStep {
  LayerStep of_layers;
  const int64_t* token_ids;       // [tokens]
  const int64_t* logits_indices;  // [sampled], the rows whose logits are wanted
  int64_t sampled;
  float* logits;  // [sampled, columns of lm_head]
};

// The tokens' rows of the embedding become x. False: a token or a position lies outside its table, nothing is done.
inline bool embed(ThreadPool& pool, const Model& model, const ModelStep& step) {
  const LayerStep& layers = step.of_layers;
  for (int64_t i = 0; i < layers.tokens; ++i) {
    if (step.token_ids[i] < 0 || step.token_ids[i] >= model.vocab_size) return false;
    if (layers.positions[i] < 0 || layers.positions[i] >= model.num_positions) return false;
  }
  const int64_t hidden = model.hidden();
  for_each_row(pool, layers.tokens, hidden, [&](int64_t token) {
    __builtin_memcpy(layers.x + token * hidden, model.embedding + step.token_ids[token] * hidden, hidden * sizeof(bf16));
  });
  return true;
}

inline void layers(ThreadPool& pool, const Model& model, const ModelStep& step, int64_t begin, int64_t end,
                   AttentionWorkspaces& spaces) {
  for (int64_t index = begin; index < end; ++index) layer(pool, model.layers[index], step.of_layers, spaces);
}

inline void logits(ThreadPool& pool, const Model& model, const ModelStep& step) {
  const int64_t hidden = model.hidden();
  bf16* normed = step.of_layers.workspace;
  for_each_row(pool, step.sampled, hidden, [&](int64_t row) {
    const bf16* x = step.of_layers.x + step.logits_indices[row] * hidden;
    rms_norm_row(x, model.norm, hidden, model.eps, normed + row * hidden);
  });
  linear(pool, applied(model.lm_head, normed, nullptr, step.logits, step.sampled));
}

}  // namespace pdserve
