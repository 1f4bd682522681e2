"""The decoder that all families share, over a paged KV cache: one varlen batch in, the wanted rows' logits out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.attention.base import AttentionBackend
from engine.batch import Batch
from engine.kv_cache import KVCache
from engine.model.config import ModelConfig
from engine.model.experts import MixtureOfExperts
from engine.model.layers import Embedding, Linear, RMSNorm, RotaryEmbedding, Rotation, SwiGLU


class Decoder(nn.Module):
    """T tokens a step, H heads, G kv heads, D head_dim."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dtype = dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, device)
        self.layers = nn.ModuleList(Layer(config, index, dtype, device) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, device=device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self,
        batch: Batch,
        kv_cache: KVCache,
        attention: AttentionBackend,
        on_layer_computed: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Logits of the rows batch.logits_indices: [num_sampled, vocab_size] float32.

        on_layer_computed(i) is called once layer i's K and V of this step are in the cache and the layer is done.
        """
        x = self.embed_tokens(batch.token_ids)  # [T, hidden]
        rotation = self.rotary.rotation(batch.positions, self.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotation, batch, kv_cache, attention)
            if on_layer_computed is not None:
                on_layer_computed(index)
        x = self.norm(x.index_select(0, batch.logits_indices))  # [num_sampled, hidden]
        logits: Tensor = self.lm_head(x)
        return logits.float()


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.self_attention = SelfAttention(config, index, dtype, device)
        self.mlp_norm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.mlp = _mlp(config, index, dtype, device)

    def forward(
        self, x: Tensor, rotation: Rotation, batch: Batch, kv_cache: KVCache, attention: AttentionBackend
    ) -> Tensor:  # [T, hidden] -> [T, hidden]
        x = x + self.self_attention(self.attention_norm(x), rotation, batch, kv_cache, attention)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class SelfAttention(nn.Module):
    """Grouped-query attention; q, k and v are one matrix, rows in that order."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale, self.window = config.head_dim**-0.5, config.window(layer)
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv_proj = Linear(
            config.hidden_size, q_size + 2 * kv_size, bias=config.attention_bias, dtype=dtype, device=device
        )
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.attention_output_bias, dtype=dtype, device=device)
        self.head_norms = HeadNorms(config, dtype, device) if config.qk_norm else None

    def forward(
        self, x: Tensor, rotation: Rotation, batch: Batch, kv_cache: KVCache, attention: AttentionBackend
    ) -> Tensor:  # [T, hidden] -> [T, hidden]
        qkv = self.qkv_proj(x).view(x.shape[0], self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        if self.head_norms is not None:
            qkv = self.head_norms(qkv)
        q = rotation.into_cache(qkv, kv_cache, self.layer, batch.slot_mapping)  # [T, H, D]
        key_cache, value_cache = kv_cache.layer(self.layer)
        attended = attention(q, key_cache, value_cache, batch.attention, self.scale, self.window)  # [T, H, D]
        out: Tensor = self.o_proj(attended.flatten(1))
        return out


class HeadNorms(nn.Module):
    """Qwen3 normalises each head's query and key before they are turned."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device) for _ in range(2)
        )

    def forward(self, qkv: Tensor) -> Tensor:  # [T, H + 2 G, D] -> the same
        q, k, v = torch.split(qkv, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return torch.cat((self.q_norm(q), self.k_norm(k), v), dim=1)


def _mlp(config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    experts = config.experts_in(layer)
    if experts is None:
        return SwiGLU(config.hidden_size, config.intermediate_size, dtype=dtype, device=device)
    return MixtureOfExperts(config.hidden_size, experts, dtype=dtype, device=device)
