// The plain C face of the kernels, as engine/native/kernels.py calls it. Shapes are checked there.
#include "limits.h"
#include "model.h"
#include "sampling.h"

namespace {

struct Kernels {
  explicit Kernels(int num_threads) : pool(num_threads), workspaces(num_threads) {}
  pdserve::ThreadPool pool;
  pdserve::AttentionWorkspaces workspaces;
};

}  // namespace

extern "C" {

Kernels* kernels_create(int num_threads) { return new Kernels(num_threads); }

void kernels_destroy(Kernels* kernels) { delete kernels; }

void kernels_pack_weight(Kernels* kernels, const pdserve::Weight* weight, pdserve::Bf16Row* packed) {
  pdserve::pack_weight(kernels->pool, *weight, packed);
}

void kernels_pack_weight_int8(Kernels* kernels, const pdserve::Weight* weight, pdserve::Int8Row* packed,
                              float* scales) {
  pdserve::pack_weight(kernels->pool, *weight, packed, scales);
}

void kernels_linear(Kernels* kernels, const pdserve::Linear* op) { pdserve::linear(kernels->pool, *op); }

void kernels_rms_norm(Kernels* kernels, const pdserve::RmsNorm* op) { pdserve::rms_norm(kernels->pool, *op); }

void kernels_head_norms(Kernels* kernels, const pdserve::HeadNorms* op) { pdserve::head_norms(kernels->pool, *op); }

void kernels_rotary_and_cache(Kernels* kernels, const pdserve::RotaryAndCache* op) {
  pdserve::rotary_and_cache(kernels->pool, *op);
}

void kernels_attention(Kernels* kernels, const pdserve::Attention* op) {
  pdserve::attention(kernels->pool, *op, kernels->workspaces);
}

int kernels_embed(Kernels* kernels, const pdserve::Model* model, const pdserve::ModelStep* step) {
  return pdserve::embed(kernels->pool, *model, *step);
}

void kernels_layers(Kernels* kernels, const pdserve::Model* model, const pdserve::ModelStep* step, int64_t begin,
                    int64_t end) {
  pdserve::layers(kernels->pool, *model, *step, begin, end, kernels->workspaces);
}

void kernels_logits(Kernels* kernels, const pdserve::Model* model, const pdserve::ModelStep* step) {
  pdserve::logits(kernels->pool, *model, *step);
}

void kernels_sample(Kernels* kernels, const pdserve::Sampling* op) { pdserve::sample(kernels->pool, *op); }

float kernels_read_memory(Kernels* kernels, const char* data, int64_t bytes) {
  return pdserve::read_memory(kernels->pool, data, bytes);
}

float kernels_multiply_registers(Kernels* kernels, int64_t count) {
  return pdserve::multiply_registers(kernels->pool, count);
}
}
