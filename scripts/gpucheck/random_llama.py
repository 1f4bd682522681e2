"""Llamas whose weights are noise, made on the device: speed and agreement need no trained model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.model.config import Llama3Scaling, ModelConfig, RopeConfig
from engine.model.decoder import Decoder
from engine.model.weights import LoadedModel


def llama3_8b(num_layers: int = 32) -> ModelConfig:
    return ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=num_layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0, llama3=Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        tie_word_embeddings=False,
        attention_bias=False,
        attention_output_bias=False,
        max_position_embeddings=8192,
        eos_token_ids=(),
    )


def tiny_llama() -> ModelConfig:
    return ModelConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_layers=3,
        num_heads=8,
        num_kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        tie_word_embeddings=False,
        attention_bias=False,
        attention_output_bias=False,
        max_position_embeddings=1024,
        eos_token_ids=(),
    )


def load_random(config: ModelConfig, dtype: torch.dtype, device: torch.device, *, std: float) -> LoadedModel:
    """The same weights on every device of a kind; drawn on the CPU in float32 where that is quick, so that CPU and GPU
    agree too."""
    model = Decoder(config, dtype, device)
    is_small = sum(parameter.numel() for parameter in model.parameters()) < 10_000_000
    source = torch.device("cpu") if is_small else device
    generator = torch.Generator(source).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if is_small:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            else:
                parameter.normal_(std=std, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(1.0)  # norms
    return LoadedModel(model, config, "random", config.rope.describe())


@dataclass(frozen=True)
class Cost:
    """What a step of a model must move and multiply at least."""

    config: ModelConfig
    bytes_per_number: int

    @property
    def layer_weights(self) -> int:
        c = self.config
        attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
        return c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)

    @property
    def head_weights(self) -> int:
        return self.config.hidden_size * self.config.vocab_size

    def decode_bytes(self, batch: int, context: int) -> int:
        """All weights once, but of the embedding a row each, and every sequence's K and V."""
        c = self.config
        kv = batch * context * c.num_layers * 2 * c.num_kv_heads * c.head_dim
        return (self.layer_weights + self.head_weights + kv) * self.bytes_per_number

    def prefill_flops(self, num_tokens: int) -> int:
        """Causal: a token meets half of the others on average. One row of logits."""
        c = self.config
        attention = 2 * c.num_layers * c.num_heads * c.head_dim * num_tokens**2
        return 2 * self.layer_weights * num_tokens + attention + 2 * self.head_weights
