"""Normalisation, rotary embedding and the write into the paged cache, against the torch model's own layers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.model.config import RopeConfig
from engine.model.layers import RMSNorm, RotaryEmbedding, Rotation
from engine.native.attention import angle_table
from engine.native.kernels import NativeKernels

CPU = torch.device("cpu")
ONE_STEP = 2**-7  # between neighbouring bfloat16 numbers, relative, at most


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def torch_norm(weight: Tensor) -> RMSNorm:
    norm = RMSNorm(weight.shape[0], 1e-5, dtype=torch.bfloat16, device=CPU)
    norm.weight.copy_(weight)
    return norm


@given(m=st.integers(1, 70), n=st.integers(1, 700))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_rms_norm_rounds_as_the_torch_layer_does(one_thread: NativeKernels, m: int, n: int) -> None:
    x, weight = random(m, m, n), random(n, n)
    actual, expected = one_thread.rms_norm(x, weight, 1e-5), torch_norm(weight)(x)
    # The mean is summed in another order, so that now and then a value falls on the other side of a rounding.
    torch.testing.assert_close(actual, expected, rtol=ONE_STEP, atol=0)
    assert (actual == expected).float().mean() > 0.99


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 128), (3, 3, 40)])
@pytest.mark.parametrize("tokens", [1, 300])
def test_head_norms_are_the_norm_of_each_head_of_q_and_k_and_leave_v(
    two_threads: NativeKernels, heads: int, kv_heads: int, head_dim: int, tokens: int
) -> None:
    qkv, weights = random(1, tokens, heads + 2 * kv_heads, head_dim), random(2, 2, head_dim)
    q, k, v = (part.clone().contiguous() for part in qkv.tensor_split((heads, heads + kv_heads), dim=1))
    two_threads.head_norms(qkv, weights[0], weights[1], kv_heads, 1e-5)
    for part, weight, normed in ((q, weights[0], qkv[:, :heads]), (k, weights[1], qkv[:, heads : heads + kv_heads])):
        assert torch.equal(normed.flatten(0, 1), two_threads.rms_norm(part.flatten(0, 1), weight, 1e-5))
    assert torch.equal(qkv[:, heads + kv_heads :], v)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 128), (2, 2, 32), (3, 3, 96)])
@pytest.mark.parametrize("tokens", [1, 300])
def test_rotary_turns_q_and_k_and_puts_k_and_v_into_their_slots(
    two_threads: NativeKernels, heads: int, kv_heads: int, head_dim: int, tokens: int
) -> None:
    qkv = random(1, tokens, (heads + 2 * kv_heads) * head_dim)
    q, k, v = qkv.clone().view(tokens, -1, head_dim).tensor_split((heads, heads + kv_heads), dim=1)
    table = angle_table(RotaryEmbedding(RopeConfig(theta=10000.0), head_dim, CPU), 7 + tokens)
    positions = torch.arange(7, 7 + tokens).flip(0)
    cos, sin = table[positions].chunk(2, dim=-1)
    exact = Rotation(torch.cat((cos, cos), -1)[:, None], torch.cat((sin, sin), -1)[:, None])
    slots = torch.randperm(2 * tokens + 64)[:tokens]
    caches = [torch.full((2 * tokens + 64, kv_heads, head_dim), float("nan")).bfloat16() for _ in range(2)]
    paged = [cache.view(2, -1, kv_heads, head_dim) for cache in caches]

    turned = two_threads.rotary_and_cache(qkv, table, positions, slots, (paged[0], paged[1]))

    assert turned.shape == (tokens, heads, head_dim)
    torch.testing.assert_close(turned, exact.apply(q.float()).bfloat16(), rtol=ONE_STEP, atol=1e-6)
    torch.testing.assert_close(caches[0][slots], exact.apply(k.float()).bfloat16(), rtol=ONE_STEP, atol=1e-6)
    assert torch.equal(caches[1][slots], v)
    unwritten = torch.ones(len(caches[0]), dtype=torch.bool).index_fill_(0, slots, False)
    assert all(cache[unwritten].isnan().all() for cache in caches)
