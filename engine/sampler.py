"""From logits to tokens, the same ones on every worker: the noise is a hash, not a stream.

Sampling is Gumbel-max: argmax(logits / temperature + g), with g = −log(−log(u)) and u a hash of (seed, position,
token id). So prefill worker, decode worker, a recompute after preemption and a migration draw the same token, whatever
else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from common.sampling import SamplingParams
from engine.upload import upload

_MASK = 2**64 - 1
# SplitMix64 (Steele, Lea, Flood 2014): its increment and its two multipliers.
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def sample(logits: Tensor, params: Seq[SamplingParams], positions: Seq[int]) -> Tensor:
    """One token id per row, on the logits' device: [num_rows] int64. Waits for nothing.

    logits: [num_rows, vocab_size] float32. positions: where each new token will stand in its sequence.
    """
    greedy = argmax_rows(logits)
    random_rows = [row for row, wanted in enumerate(params) if not wanted.is_greedy]
    if random_rows:
        rows = upload(random_rows, torch.int64, logits.device)
        keys = [_key(params[row].seed, positions[row]) for row in random_rows]
        scores = _restrict(logits[rows], [params[row] for row in random_rows])
        greedy[rows] = argmax_rows(scores + gumbel_noise(keys, logits.shape[-1], logits.device))
    return greedy


def argmax_rows(scores: Tensor) -> Tensor:
    """scores.argmax(dim=-1), the first of equals. [num_rows, vocab_size] -> [num_rows] int64.

    On a CPU numpy looks at many numbers at once where torch compares them one by one: three times as fast or more.
    """
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)


def gumbel_noise(keys: Seq[int], vocab_size: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise [len(keys), vocab_size] float64, a pure function of (key, token id)."""
    start = upload([_signed(key) for key in keys], torch.int64, device)[:, None]
    token_ids = torch.arange(vocab_size, dtype=torch.int64, device=device)[None, :]
    bits = _mix_tensor(start + token_ids * _signed(_GOLDEN))
    uniform = (_shift_right(bits, 11).to(torch.float64) + 0.5) * 2.0**-53
    return -(-uniform.log()).log()


def _restrict(logits: Tensor, params: Seq[SamplingParams]) -> Tensor:
    """logits / temperature in float64, −inf outside each row's top-k and top-p sets."""
    temperature = upload([wanted.temperature for wanted in params], torch.float64, logits.device)
    scores = logits.to(torch.float64) / temperature[:, None]
    if all(wanted.top_p == 1 and wanted.top_k == 0 for wanted in params):
        return scores
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    vocab_size = logits.shape[-1]
    top_k = upload([wanted.top_k or vocab_size for wanted in params], torch.int64, logits.device)
    top_p = upload([wanted.top_p for wanted in params], torch.float64, logits.device)
    is_beyond_k = torch.arange(vocab_size, device=logits.device)[None, :] >= top_k[:, None]
    ranked = ranked.masked_fill(is_beyond_k, -torch.inf)
    probabilities = ranked.softmax(dim=-1)
    # the smallest set whose probability reaches top_p: a token is out if those before it already do
    is_beyond_p = probabilities.cumsum(dim=-1) - probabilities >= top_p[:, None]
    ranked = ranked.masked_fill(is_beyond_p & (top_p < 1)[:, None], -torch.inf)
    return torch.empty_like(scores).scatter_(-1, order, ranked)


def _key(seed: int, position: int) -> int:
    return _mix(_mix(seed + _GOLDEN) ^ position)


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _mix_tensor(x: Tensor) -> Tensor:
    """`_mix` on int64, whose products wrap as unsigned ones do."""
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
