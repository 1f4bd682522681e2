"""A transformer small enough to read: two layers, d_model 4, one head, four tokens, every weight set by hand.

It knows one phrase, 你好世界. Dimension i of the hidden state means "token i": the embedding of a token is a 1 in its
own dimension, and the last hidden state is the logits.

Left out, because nothing on these pages hangs on them: RMSNorm, rotary positions (a real model turns Q and K by their
position before K enters the cache), several heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

D_MODEL = 4
VOCABULARY = "你好世界"
EMBEDDING = torch.eye(4, dtype=torch.float64)  # [vocab, d_model]


@dataclass(frozen=True)
class Layer:
    """x += attention(x); x += mlp(x). Weights act on rows: q = x @ w_q."""

    w_q: Tensor  # each [d_model, d_model]
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    mlp_up: Tensor
    mlp_bias: Tensor  # [d_model]
    mlp_down: Tensor


@dataclass
class Cache:
    """One sequence's K and V: per layer one [num_cached, d_model] tensor of each. Nothing else is kept."""

    keys: list[Tensor] = field(default_factory=lambda: [torch.empty(0, D_MODEL, dtype=torch.float64) for _ in LAYERS])
    values: list[Tensor] = field(default_factory=lambda: [torch.empty(0, D_MODEL, dtype=torch.float64) for _ in LAYERS])

    @property
    def num_tokens(self) -> int:
        return len(self.keys[0])


@dataclass(frozen=True)
class LayerTrace:
    """What one layer computed for one sequence in one step."""

    q: Tensor  # [num_new, d_model]
    k: Tensor
    v: Tensor
    weights: Tensor  # [num_new, num_cached + num_new]; gone after the step


@dataclass(frozen=True)
class Step:
    """What one step gave one sequence."""

    layers: list[LayerTrace]
    hidden: Tensor  # [num_new, d_model]

    @property
    def logits(self) -> Tensor:
        """Of the last position only: [vocab]."""
        return self.hidden[-1] @ EMBEDDING.T

    @property
    def next_token(self) -> str:
        return VOCABULARY[int(self.logits.argmax())]


def forward(tokens: str, cache: Cache, is_masked: bool = True) -> Step:
    """Run new tokens of one sequence; their K and V join the cache."""
    return forward_batch([(tokens, cache)], is_masked)[0]


def forward_batch(parts: Sequence[tuple[str, Cache]], is_masked: bool = True) -> list[Step]:
    """One step over several sequences: every new token is one row, and all rows share every matrix product.

    Only attention tells the sequences apart: each row looks into its own sequence's cache.
    """
    token_ids = [VOCABULARY.index(token) for tokens, _ in parts for token in tokens]
    row_counts = [len(tokens) for tokens, _ in parts]
    traces: list[list[LayerTrace]] = [[] for _ in parts]
    x = EMBEDDING[token_ids]  # [num_rows, d_model]
    for index, layer in enumerate(LAYERS):
        q, k, v = x @ layer.w_q, x @ layer.w_k, x @ layer.w_v
        attended = []
        rows_of_each = zip(*(torch.split(rows, row_counts) for rows in (q, k, v)), strict=True)
        for (_, cache), trace, (q_i, k_i, v_i) in zip(parts, traces, rows_of_each, strict=True):
            cache.keys[index] = torch.cat((cache.keys[index], k_i))
            cache.values[index] = torch.cat((cache.values[index], v_i))
            weights = attention_weights(q_i, cache.keys[index], is_masked)
            attended.append(weights @ cache.values[index])
            trace.append(LayerTrace(q_i, k_i, v_i, weights))
        x = x + torch.cat(attended) @ layer.w_o
        x = x + torch.relu(x @ layer.mlp_up + layer.mlp_bias) @ layer.mlp_down
    return [Step(trace, hidden) for trace, hidden in zip(traces, torch.split(x, row_counts), strict=True)]


def attention_weights(q: Tensor, keys: Tensor, is_masked: bool = True) -> Tensor:
    """softmax(q kᵀ / √d). The rows of q are the last ones of the sequence; each sees itself and what came before."""
    scores = q @ keys.T / D_MODEL**0.5
    if is_masked:
        num_cached = len(keys) - len(q)
        is_future = torch.ones_like(scores, dtype=torch.bool).triu(diagonal=num_cached + 1)
        scores = scores.masked_fill(is_future, float("-inf"))
    return torch.softmax(scores, dim=-1)


def _moved_on(steps: int) -> Tensor:
    """The matrix that turns "token i" into "token i + steps" of the phrase, round and round."""
    return torch.eye(4, dtype=torch.float64).roll(steps, dims=1)


_SAME = torch.eye(4, dtype=torch.float64)

LAYERS: tuple[Layer, ...] = (
    # Layer 1 reads the phrase. Each key says "I come before ...", so a token looks mostly at its predecessor; what it
    # finds there votes for the token two further on. The MLP then takes the token's own vote away.
    Layer(
        w_q=4 * _SAME,
        w_k=_moved_on(1),
        w_v=_SAME,
        w_o=0.8 * _moved_on(2),
        mlp_up=_SAME,
        mlp_bias=torch.full((4,), -0.9, dtype=torch.float64),
        mlp_down=-10 * _SAME,
    ),
    # Layer 2 compares votes: each token looks at those that vote as it does and adds their votes to its own; the MLP
    # triples what is positive.
    Layer(
        w_q=2 * _SAME,
        w_k=2 * _SAME,
        w_v=_SAME,
        w_o=_SAME,
        mlp_up=_SAME,
        mlp_bias=torch.zeros(4, dtype=torch.float64),
        mlp_down=2 * _SAME,
    ),
)
