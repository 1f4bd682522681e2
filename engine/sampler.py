"""From logits to tokens, the same ones on every worker: the noise is a hash, not a stream.

Sampling is Gumbel-max: the token with the highest score + g, where

    score = (logit - the row's highest logit) / temperature
    g     = -log(-log(u)), u of 52 bits, a hash of (seed, position, token id); see engine/noise.py

among the tokens that the request allows: the first top_k by logit and then by id, and of those the fewest whose
probability reaches top_p; see engine/allowed_tokens.py. So prefill worker, decode worker, a recompute after preemption
and a migration draw the same token, whatever else is in the batch.

They also draw it on every device and backend (here on CPU and CUDA, and engine/native/src/sampling.h). Hash and rank
are integers. So are the probabilities that top_p adds up, in units of 2^-40 of the most likely token's: no order of
summation changes a sum. What is left are exp and log in float64, whose last bit differs between libraries: two tokens
would have to be within some 1e-15 of each other for that to decide, which no one will see happen.

A row with a NaN, or whose highest logit is infinite, gives its argmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from common.sampling import SamplingParams
from engine.allowed_tokens import AllowedTokens, Wishes, all_tokens, restricted_tokens
from engine.noise import gumbel_noise, noise_key
from engine.upload import upload

CPU_ELEMENTS = 1 << 16  # logits that a CPU works on at a time: what is computed of them stays in its caches


class Sampler(Protocol):
    def __call__(self, logits: Tensor, params: Seq[SamplingParams], positions: Seq[int]) -> Tensor:
        """One token id per row, on the logits' device: [num_rows] int64. Waits for no GPU.

        logits: [num_rows, vocab_size] float32. positions: where each new token will stand in its sequence.
        """


def sample(logits: Tensor, params: Seq[SamplingParams], positions: Seq[int]) -> Tensor:
    """The Sampler that runs wherever torch does."""
    tokens = argmax_rows(logits)
    for rows in _rows_at_once(params, logits):
        index = upload(rows, torch.int64, logits.device)
        keys = [noise_key(params[row].seed, positions[row]) for row in rows]
        wishes = Wishes.of([params[row] for row in rows], logits.shape[-1], logits.device)
        some, argmax = logits[index], tokens[index]
        highest = some.amax(dim=-1)
        allowed = restricted_tokens(some, wishes) if is_restricted(params[rows[0]]) else all_tokens(some, wishes)
        drawn = _draw(allowed, upload(keys, torch.int64, logits.device)[:, None])
        tokens[index] = torch.where(highest.isfinite(), drawn, argmax)
    return tokens


def argmax_rows(scores: Tensor) -> Tensor:
    """scores.argmax(dim=-1), the first of equals. [num_rows, vocab_size] -> [num_rows] int64.

    On a CPU numpy looks at many numbers at once where torch compares them one by one: three times as fast or more.
    """
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)


def is_restricted(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1


def _rows_at_once(params: Seq[SamplingParams], logits: Tensor) -> Iterator[list[int]]:
    """The rows that are not greedy, those without top_k and top_p and those with either apart; on a GPU, where each
    operation costs a launch, in one go each."""
    num_rows, vocab_size = logits.shape
    most = max(1, CPU_ELEMENTS // vocab_size) if logits.device.type == "cpu" else num_rows
    for restricted in (False, True):
        rows = [row for row, each in enumerate(params) if not each.is_greedy and is_restricted(each) == restricted]
        for start in range(0, len(rows), most):
            yield rows[start : start + most]


def _draw(allowed: AllowedTokens, keys: Tensor) -> Tensor:
    winners = argmax_rows(gumbel_noise(keys, allowed.token_ids).add_(allowed.scores))
    return allowed.token_ids.expand_as(allowed.scores).gather(-1, winners[:, None])[:, 0]
