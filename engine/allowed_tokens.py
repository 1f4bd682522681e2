"""Which tokens a request allows, and their scores: temperature, top_k and top_p, as engine/sampler.py defines them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from common.sampling import SamplingParams
from engine.upload import upload

FEW = 4096  # tokens that nearly always reach top_p
_LAST_ID = 2**32 - 1


@dataclass(frozen=True)
class AllowedTokens:
    token_ids: Tensor  # [1 or num_rows, num_tokens] int64
    scores: Tensor  # [num_rows, num_tokens] float64, -inf: not allowed


@dataclass(frozen=True)
class Wishes:
    """What rows want: columns [num_rows, 1] on the logits' device."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor  # vocab_size: off
    top_k_list: list[int]  # the same on the host

    @staticmethod
    def of(params: Seq[SamplingParams], vocab_size: int, device: torch.device) -> Wishes:
        top_k_list = [min(each.top_k or vocab_size, vocab_size) for each in params]
        return Wishes(
            temperature=upload([each.temperature for each in params], torch.float64, device)[:, None],
            top_p=upload([each.top_p for each in params], torch.float64, device)[:, None],
            top_k=upload(top_k_list, torch.int64, device)[:, None],
            top_k_list=top_k_list,
        )


def all_tokens(logits: Tensor, wishes: Wishes) -> AllowedTokens:
    """logits: [num_rows, vocab_size] float32."""
    token_ids = torch.arange(logits.shape[-1], device=logits.device)[None, :]
    return AllowedTokens(token_ids, _scores(logits, _highest(logits), wishes))


def restricted_tokens(logits: Tensor, wishes: Wishes) -> AllowedTokens:
    """Ranks no more tokens than the largest top_k. Where one is off that is the whole vocabulary, but a CPU tries
    some first; a GPU would have to be waited for to know whether they were enough."""
    vocab_size, most = logits.shape[-1], max(wishes.top_k_list)
    ranks, totals = _ranks(logits), _totals(logits, wishes)
    if logits.device.type == "cpu" and most > FEW:
        some = max([FEW, *(top_k for top_k in wishes.top_k_list if top_k < vocab_size)])
        found = _first(some, logits, ranks, totals, wishes)
        if found.scores[:, -1].isneginf().all():
            return found
    return _first(most, logits, ranks, totals, wishes)


def _first(num_tokens: int, logits: Tensor, ranks: Tensor, totals: Tensor | None, wishes: Wishes) -> AllowedTokens:
    """Of each row the `num_tokens` that rank first, no less than any top_k that is on."""
    is_all = num_tokens == logits.shape[-1]
    # no two ranks are equal, so there is one right answer
    ranked = ranks.sort(descending=True).values if is_all else ranks.topk(num_tokens).values
    token_ids = _LAST_ID - (ranked & _LAST_ID)
    scores = _scores(logits.gather(-1, token_ids), _highest(logits), wishes)
    is_out = torch.arange(num_tokens, device=logits.device)[None, :] >= wishes.top_k
    masses = _masses(scores).masked_fill_(is_out, 0)
    total = masses.sum(-1, keepdim=True)
    if totals is not None:
        total = torch.where(wishes.top_k < logits.shape[-1], total, totals)
    # a token is out if those before it reach top_p already
    is_beyond = (masses.cumsum(-1) - masses).to(torch.float64) >= wishes.top_p * total
    is_out |= is_beyond & (wishes.top_p < 1)
    return AllowedTokens(token_ids, scores.masked_fill_(is_out, -torch.inf))


def _ranks(logits: Tensor) -> Tensor:
    """An integer per token, higher for a higher logit and, of equal ones, for the lower id: [num_rows, vocab_size]."""
    bits = (logits + 0.0).view(torch.int32).to(torch.int64)  # -0.0 becomes 0.0, which it equals
    bits ^= (bits >> 63) & 0x7FFFFFFF  # of negative floats the one with larger bits is the lower
    bits <<= 32
    bits += _LAST_ID - torch.arange(logits.shape[-1], device=logits.device)
    return bits


def _totals(logits: Tensor, wishes: Wishes) -> Tensor | None:
    """The mass of the whole vocabulary, if a row without top_k needs it."""
    if max(wishes.top_k_list) < logits.shape[-1]:
        return None
    return _masses(_scores(logits, _highest(logits), wishes)).sum(-1, keepdim=True)


def _masses(scores: Tensor) -> Tensor:
    """Probabilities as integers, the most likely token's is 2^40: sums of up to 2^23 are exact, in any order."""
    return scores.exp().mul_(2.0**40).round_().to(torch.int64)


def _scores(logits: Tensor, highest: Tensor, wishes: Wishes) -> Tensor:
    return logits.to(torch.float64).sub_(highest).div_(wishes.temperature)


def _highest(logits: Tensor) -> Tensor:
    return logits.amax(dim=-1, keepdim=True)
