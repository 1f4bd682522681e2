"""What a step must read and multiply at the very least, from the model's shape alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.model.config import ModelConfig


@dataclass(frozen=True)
class NumberBytes:
    """Of one number; the scales of quantised weights are not worth counting."""

    weight: int
    cached: int  # in the KV cache


@dataclass(frozen=True)
class Work:
    num_bytes: float  # weights once, and the K and V that any query of the step sees
    num_operations: float  # multiplications and additions


def step_work(config: ModelConfig, number_bytes: NumberBytes, sequences: Sequence[tuple[int, int]]) -> Work:
    """One step over sequences of (query length, tokens in the cache after it), each of which samples a token."""
    num_tokens = sum(query_len for query_len, _ in sequences)
    head = config.vocab_size * config.hidden_size
    num_weights, num_cached, num_operations = head, 0, 2 * head * len(sequences)
    for layer in range(config.num_layers):
        read, multiplied = _linear_weights(config, layer, num_tokens)
        window = config.window(layer)
        num_weights += read
        num_operations += 2 * multiplied * num_tokens
        for query_len, seq_len in sequences:
            num_seen = seq_len if window is None else min(seq_len, query_len + window - 1)
            num_cached += 2 * num_seen * config.num_kv_heads * config.head_dim
            num_pairs = _pairs(seq_len, window) - _pairs(seq_len - query_len, window)
            num_operations += 4 * num_pairs * config.num_heads * config.head_dim
    num_bytes = num_weights * number_bytes.weight + num_cached * number_bytes.cached
    return Work(float(num_bytes), float(num_operations))


def _linear_weights(config: ModelConfig, layer: int, num_tokens: int) -> tuple[int, int]:
    """How many weights of a layer a step reads, and by how many of them each token is multiplied."""
    heads = 2 * (config.num_heads + config.num_kv_heads)  # q and o; k and v
    attention = config.hidden_size * heads * config.head_dim
    experts = config.experts_in(layer)
    if experts is None:
        both = attention + 3 * config.hidden_size * config.intermediate_size
        return both, both
    one_expert = 3 * config.hidden_size * experts.intermediate_size
    shared = attention + config.hidden_size * experts.num_experts
    num_read = min(experts.num_experts, num_tokens * experts.num_active)  # at most: tokens may agree
    return shared + num_read * one_expert, shared + experts.num_active * one_expert


def _pairs(length: int, window: int | None) -> int:
    """(query, key) pairs of a whole causal sequence."""
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window
