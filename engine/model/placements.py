"""Which weights a model consists of, and where each goes among the decoder's parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.model.config import ModelConfig


@dataclass(frozen=True)
class Placement:
    """Where a named weight goes: rows [row, row + shape[0]) of one of the model's parameters."""

    name: str  # the engine's, see Family
    parameter: str
    shape: tuple[int, ...]
    row: int = 0


def placements(config: ModelConfig) -> Iterator[Placement]:
    """Every weight that a model of this config consists of."""
    hidden = config.hidden_size
    yield Placement("model.embed_tokens.weight", "embed_tokens.weight", (config.vocab_size, hidden))
    for index in range(config.num_layers):
        theirs, ours = f"model.layers.{index}", f"layers.{index}"
        yield Placement(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight", (hidden,))
        yield from _attention(config, f"{theirs}.self_attn", f"{ours}.self_attention")
        yield Placement(f"{theirs}.post_attention_layernorm.weight", f"{ours}.mlp_norm.weight", (hidden,))
        yield from _mlp(config, index, f"{theirs}.mlp", f"{ours}.mlp")
    yield Placement("model.norm.weight", "norm.weight", (hidden,))
    if not config.tie_word_embeddings:
        yield Placement("lm_head.weight", "lm_head.weight", (config.vocab_size, hidden))


def _attention(config: ModelConfig, theirs: str, ours: str) -> Iterator[Placement]:
    hidden, head_dim = config.hidden_size, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    for part, row, size in (("q_proj", 0, q), ("k_proj", q, kv), ("v_proj", q + kv, kv)):
        yield Placement(f"{theirs}.{part}.weight", f"{ours}.qkv_proj.weight", (size, hidden), row)
        if config.attention_bias:
            yield Placement(f"{theirs}.{part}.bias", f"{ours}.qkv_proj.bias", (size,), row)
    yield Placement(f"{theirs}.o_proj.weight", f"{ours}.o_proj.weight", (hidden, q))
    if config.attention_output_bias:
        yield Placement(f"{theirs}.o_proj.bias", f"{ours}.o_proj.bias", (hidden,))
    if config.qk_norm:
        yield Placement(f"{theirs}.q_norm.weight", f"{ours}.head_norms.q_norm.weight", (head_dim,))
        yield Placement(f"{theirs}.k_norm.weight", f"{ours}.head_norms.k_norm.weight", (head_dim,))


def _mlp(config: ModelConfig, layer: int, theirs: str, ours: str) -> Iterator[Placement]:
    hidden, experts = config.hidden_size, config.experts_in(layer)
    if experts is None:
        yield from _swiglu(theirs, ours, hidden, config.intermediate_size)
        return
    yield Placement(f"{theirs}.gate.weight", f"{ours}.router.weight", (experts.num_experts, hidden))
    for expert in range(experts.num_experts):
        yield from _swiglu(f"{theirs}.experts.{expert}", ours, hidden, experts.intermediate_size, expert)


def _swiglu(theirs: str, ours: str, hidden: int, inner: int, expert: int = 0) -> Iterator[Placement]:
    """A lone MLP lies as the first of several experts would."""
    gate_row, down_row = 2 * inner * expert, hidden * expert
    yield Placement(f"{theirs}.gate_proj.weight", f"{ours}.gate_up_proj.weight", (inner, hidden), gate_row)
    yield Placement(f"{theirs}.up_proj.weight", f"{ours}.gate_up_proj.weight", (inner, hidden), gate_row + inner)
    yield Placement(f"{theirs}.down_proj.weight", f"{ours}.down_proj.weight", (hidden, inner), down_row)
